"""`paged-kv doctor`: are the kernels right and quick on this device?

doctor_command  the command
blas            which BLAS MLX runs on
examination     runs every kernel, and leaves out those that are wrong or slow
kernel_times    times reading kernels and plain operations in turns
report          one file for an issue: this, a quick bench, versions and the log
"""
