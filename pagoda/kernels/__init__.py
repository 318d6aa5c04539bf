"""The kernels: the ops of a model, one folder per op, with a slow, obvious reference next to the fast versions.

OP/reference.py    the definition of an op, in plain torch; OP/library.py: torch's faster way, where there is one
OP/cpu.cpp         the native kernel, with its headers; OP/triton_OP.py: the kernel for GPUs
reference_ops.py, torch_ops.py, native_ops.py, triton_ops.py   all ops of one kind; select.py chooses between them
ops.py             what they have besides the forward's ops: preparing weights, moving cache blocks, sampling
native/            compiles the C++ sources on first use; abi.py declares what both sides share, and header.py makes the
                   header of it, of the op table and of the table of weight forms
linear/forms.py    the table of weight forms; quantize.py: what codes mean; packed.py, triton_forms.py: packed weights
replay/            a forward recorded once, and then run in one native call
batch.py, transfer.py, triton_support.py   the batch with torch's tensors, copies to a device, what Triton kernels share
"""
