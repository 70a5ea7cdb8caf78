"""Prefix caching: prompts with a common prefix share pages, in memory and on disk.

prefix_cache     inserts and looks up prompts
window_prefixes  rebuilds rings from which a sequence can resume after a prefix
snapshots        states of recurrent layers, by the prompt that they belong to
stored_prefixes  keeps prompts in a page store
keeping          the tiers below memory: what they keep, and when to read it
"""
