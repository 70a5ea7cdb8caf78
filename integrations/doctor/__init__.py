"""`paged-kv doctor`: are the kernels right and quick on this device?

doctor_command  the command
examination     runs every kernel and compiled steps, and leaves out what is wrong or slow
compiled_steps  compares compiled steps with steps that Python takes
findings        what was found, as a verdict, a line for each group, and all of it
kernel_times    times reading kernels and plain operations in turns
progress        shows each line as it is found
"""
