"""Prefix caching: prompts with a common prefix share pages, in memory and on disk.

prefix_cache     inserts and looks up prompts
node_pages       finds the page that a node of the index holds in a layer group
window_prefixes  rebuilds rings from which a sequence can resume after a prefix
snapshots        states of recurrent layers, by the prompt that they belong to
stored_prefixes  keeps prompts in a page store
rates            estimates whether reading is quicker than computing
"""
