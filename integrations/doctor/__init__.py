"""`paged-kv doctor`: are the kernels right on this device?

doctor_command  the command
examination     runs every kernel, and disables a backend that is wrong
report          shows how far it is; one file for an issue: this, a bench, versions and the log
"""
