"""Decode steps that are recorded once and repeated without Python.
recordings        the recordings of a model's pool
recording         one recording
model_contents    the arrays of a model
"""
