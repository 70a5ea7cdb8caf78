"""`paged-kv doctor`: are the kernels right and quick on this device?

doctor_command  the command
examination     runs every kernel and compiled steps, and leaves out what is wrong or slow
compiled_steps  compares compiled steps with steps that Python takes
report          shows how far it is; one file for an issue: this, a bench, versions and the log
kernel_times    times reading kernels and plain operations in turns
"""
