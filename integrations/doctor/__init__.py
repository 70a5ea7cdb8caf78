"""`paged-kv doctor`: are the kernels right on this device?

doctor_command  the command
examination     runs every kernel and compiled steps, and disables a backend that is wrong
compiled_steps  compares compiled steps with steps that Python takes
report          shows how far it is; one file for an issue: this, a bench, versions and the log
"""
