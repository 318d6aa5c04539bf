// What keys mean where one writes.

export const isTouch = () => matchMedia("(pointer: coarse)").matches;

// Enter sends, but where an input method uses it to choose a word; on a touch screen there is a button to send.
export function sends(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229 && !isTouch();
}
