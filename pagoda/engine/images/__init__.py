"""Images: from what a caller sends to the input of a vision tower and the image tokens of a prompt. Needs Pillow.

source.py      where an image is: a data URL, a URL, a file, a PIL image; which of them a caller may name; its bytes
fetch.py       an allowed URL's bytes; the address that is connected to must be public
decode.py      bytes to pixels, bounded before they are decoded
process.py     pixels to MediaItems' features, and to what the prompt has in place of the image, per family
"""
