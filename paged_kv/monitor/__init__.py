"""What a process holds, shown to people and to other processes.

process_view        all pools of a process at one moment: data, and its JSON
pool_views          makes views of pools
publisher           writes what has changed into a file that other processes of the user read
published           reads what other processes publish
runtime_folder      the private folder of those files
stats_table         the tables and maps of `paged-kv stats`
stats_plot          plots them
prometheus_metrics  the same as Prometheus' text
"""
