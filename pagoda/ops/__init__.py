"""The ops that models call, and the types of their arguments. No torch: tensors are opaque here.

forward.py      the op table: each op is a method, decorated with what Python's types cannot say
declare.py      that decorator's words: Rows, Table, Packed, Cache, Group, ...; what an Op is
shape_rules.py  checks of shapes against each other
batch.py        a step's input: ForwardBatch, AttentionMetadata, KVLayer
tensor.py       Tensor, LinearWeight and other opaque types
"""
