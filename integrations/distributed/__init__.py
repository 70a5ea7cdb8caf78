"""One model on several machines: how their processes ("ranks") meet, agree and end.

    connected_ranks     connects the ranks that mlx.launch has started, and asks them questions
    connections         authenticated connections between rank 0 and the others
    sharded_model       over which ranks a model is sharded, and what its cache holds on each
    watch               ends this process when another rank has died or hangs

mlx.distributed carries the arrays of a step. Questions go over connections of their own: they do
not wait behind a step in MLX's stream, they show which rank is missing, and an idle server does not
poll. `paged_kv.ranks` is what the other rooms see of this.
"""
