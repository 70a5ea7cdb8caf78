"""Prefix caching: prompts that begin alike share pages, in memory and on disk.

prefix_cache     inserts and looks up prompts
node_pages       which pages of a sequence a prompt's nodes hold
window_prefixes  rings with which a sequence can resume after a prefix
snapshots        states of recurrent layers, by the prompt that they belong to
stored_prefixes  prompts in a page store
lower_tier       what a tier below memory must do
page_bytes       pages as bytes, and back
"""
