"""What a process holds, shown to people and to other processes.

process_view        all pools of a process at one moment: data, and its JSON
publisher           makes it, and writes it to a file when other processes of the user ask
processes           asks the processes of the user
stats_table         the tables and maps of `paged-kv stats`
stats_plot          plots them
prometheus_metrics  the same as Prometheus' text
"""
