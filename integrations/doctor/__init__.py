"""`paged-kv doctor`: are the kernels right on this device?

doctor_command  the command
examination     says what is known of the kernels, and checks all of them
report          one file for an issue: this, a bench, versions and the log
"""
