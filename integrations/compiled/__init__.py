"""Decode steps that are recorded once and repeated without Python.
recordings        the recordings of a model's pool
recording         one recording
exported_graph    the graph of a function, to be compared
cache_states      the arrays of caches without pages
model_contents    the weights of a model, and whether anything else of it changes
"""
