"""Sample figures of benches, one set for each table."""

from typing import Any

from tests.support.family_figures import FAMILY_FIGURES

PHASE = {"seconds": 0.002, "new_bytes": 2**20, "blocks_used": 128, "blocks_copied_change": 8}
GROWN = {
    "held_bytes": 512 * 2**20,
    "peak_above_held_bytes": 2**20,
    "copied_for_growth_bytes": 3 * 2**30,
    "median_step_seconds": 0.00064,
    "max_step_seconds": 0.98,
}
RUN = {
    "wall_seconds": 90.25,
    "prompt_tokens_per_second": 1234.5,
    "generation_tokens_per_second": 99.6,
    "all_tokens_per_second": 400.0,
    "peak_memory_bytes": 2**30,
    "peak_tokens_held": 1024,
}
ADMITTED = {
    "reserve": [{"running_mean": 1.0, "preemptions": 0}],
    "optimistic": [{"running_mean": 6.4, "preemptions": 3}],
    "speed_ratio": 2.5,
    "requests": 200,
    "requests_wrong": 0,
}
TIMES = {"p50": 0.012, "p95": 0.25, "p99": 1.5}
SERVED = {
    "tokens_per_second": 50.0,
    "first_token_seconds": TIMES,
    "per_token_seconds": TIMES,
    "whole_seconds": TIMES,
}
FIGURES: dict[str, dict[str, Any]] = {
    "publishing": {
        "batch": 8,
        "context": 1024,
        "step_s": 0.0211,
        "with_over_without": 1.0042,
        "without_over_without": 1.013,
        "look_cpu_s": 0.00031,
        "busy_share": 0.00062,
        "snapshot_s": 0.0000112,
        "snapshot_blocks": 10_000,
        "reserve_s": 0.0000041,
        "reserve_traced_s": 0.0000052,
    },
    "allocator": {
        "blocks_used": 100_000,
        "blocks_free": 100_000,
        "pairs_per_second": 146_382,
        "bulk_allocated_blocks_per_second": 6_800_797,
        "bulk_released_blocks_per_second": 4_824_961,
        "pair_p50_ns": 7324,
        "pair_p99_ns": 10260,
        "pair_p99.9_ns": 88604,
        "fork_of_128_blocks_ns": 21324,
        "targets": {
            "pairs_per_second": 150_000,
            "bulk_allocated_blocks_per_second": 1_000_000,
            "bulk_released_blocks_per_second": 1_000_000,
        },
    },
    "growth": {
        "tokens": 16_384,
        "tokens_per_step": {"decode": 1, "prefill": 2_048},
        "decode": {"KVCache": GROWN, "pages": GROWN},
        "prefill": {"KVCache": GROWN, "pages": GROWN},
    },
    "batch_operations": {
        "tokens": 4_096,
        "lengths": [4_094, 4_062],
        "operations": {
            "merge": {
                "mlx_lm": {"operation": PHASE, "next_write": PHASE},
                "paged": {"operation": PHASE, "next_write": PHASE},
                "ratios": {"operation": {"seconds": 681.2}, "next_write": {"seconds": 0.25}},
            }
        },
    },
    "admission": {
        "model": "stdlib-llama",
        "dtype": "float32",
        "pool_bytes": 16 << 20,
        "short_answers": {"1900": ADMITTED, "512": ADMITTED},
        "answers_of_max_tokens": ADMITTED,
    },
    "serving": {
        "model": "stdlib-llama",
        "dtype": "float32",
        "backend": "plain",
        "requests": 32,
        "token_bytes": 6144,
        "requests_with_equal_tokens_in_all_runs": 31,
        "mlx_lm": {**RUN, "peak_kv_bytes": {"nbytes": 3 * 2**20}},
        "paged": {**RUN, "peak_kv_bytes": {"active": 2**20, "mapped": 2**21}},
    },
    "serving_http": {
        "model": "stdlib-llama",
        "dtype": "float32",
        "clients": 16,
        "requests": 96,
        "equal_texts": 95,
        "mlx_lm": SERVED,
        "paged": {**SERVED, "tokens_per_second": 123.4},
    },
    "serving_shared": {
        "model": "stdlib-llama",
        "dtype": "float32",
        "clients": 8,
        "shared_tokens": 1400,
        **{
            wave: {
                "mlx_lm": SERVED,
                "paged": {**SERVED, "tokens_per_second": 123.4},
                "requests": 24,
                "equal_texts": 23,
            }
            for wave in ("new", "known")
        },
    },
    "server_soak": {
        "requests": 2000,
        "truth": {"kinds": {"greedy": 900, "tools": 103}, "wrong": [], "behaviours": {"reads": 9}},
        "differences": [],
        "first": {"resident_bytes": 2e8, "files": 16, "threads": 19},
        "last": {"resident_bytes": 2.1e8, "files": 16, "threads": 20},
        "counted": {
            "kv_active_bytes": 0,
            "num_preemptions_total": 300,
            "store_written_bytes_total": 2e9,
        },
        "stored_bytes": 28e6,
        "store_limit_bytes": 30_000_000,
    },
    "freed_buffers": {
        "models": {
            "stdlib-llama": {
                "step_bytes": 40e6,
                "limits": {
                    "step": {
                        "rate_over_no_limit": 0.99,
                        "cache_bytes": 39e6,
                        "active_bytes": 60e6,
                        "resident_bytes": 90e6,
                    }
                },
            }
        }
    },
    "live_arrays": {
        "rows": 64,
        "weight_bytes": 22e6,
        "server_bytes": 64e6,
        "step_bytes": 40e6,
        "served": {
            "noted": [
                {
                    "requests": 10_000,
                    "resident_bytes": 2e8,
                    "most_resident_bytes": 3e8,
                    "arrays": 159,
                    "mlx_active_bytes": 9e7,
                    "mlx_peak_bytes": 1e8,
                    "mlx_cache_bytes": 0,
                }
            ]
        },
        "generated": {
            side: {"noted": [{"tokens": 300_000, "arrays": arrays}]}
            for side, arrays in (("mlx_lm", 275), ("paged", 240))
        },
    },
    "cpu_kernels": {
        "backend": "native",
        "read_bytes_per_second": 40e9,
        "float16": {
            "decode_of_1_at_32k": {"pages_bytes_per_second": 30e9, "times_mlx": 80.4},
            "decode_of_1_at_1k": {"pages_bytes_per_second": 20e9, "times_mlx": 60.0},
            "short_beside_long": {"short_over_long_per_byte": 1.9},
            "decode_of_8_at_32k": {"pages_bytes_per_second": 34e9},
            "prefill": {"pages_flops": 2e11, "share_of_matrix_product": 0.7, "times_mlx": 90.0},
            "write": {"large_pool_seconds": 2e-5, "copy_seconds": 1e-6},
            "overhead": {"at_300_seconds": 8e-5, "at_1_seconds": 6e-5},
            "shuffled_pages": {"shuffled_over_in_order": 1.01, "spread_of_in_order": 1.02},
        },
    },
    "held_bytes": {
        "shortest": 1 << 10,
        "headline": 1 << 15,
        "by_length": {
            model: {
                name: [
                    {
                        "rows": rows,
                        "tokens": 4097,
                        "bits": bits,
                        "over_codes": 0.16,
                        "peak_bits": 9.5,
                    }
                    for rows in (1, 8)
                ]
                for name, bits in (("fp16", 16.0), ("q8", 9.0), ("q4", 5.2))
            }
            for model in ("llama", "gemma3")
        },
        "one_row": {
            name: {"mean_bits_to_32k": bits, "worst_bits_to_32k": bits + 4}
            for name, bits in (("mlx-lm", 16.2), ("fp16", 16.5), ("q8", 9.0), ("q4", 5.0))
        },
    },
    "distributed": {
        "1": {
            "tokens_per_s": 150.0,
            "least": 131.0,
            "most": 158.0,
            "bytes_on_each_rank": [2 << 20],
        },
        "2": {
            "tokens_per_s": 116.4,
            "least": 111.0,
            "most": 148.0,
            "bytes_on_each_rank": [1 << 20] * 2,
        },
    },
    "shared_pages": {
        "instruction_set": "avx2",
        "tree_rows": 64,
        "tree_pages": 32,
        "tree": {"look_seconds": 1.5e-5, "nothing_changed_seconds": 1e-6},
        **{
            dtype: {
                "8_rows_behind_512": {
                    "together_seconds": 0.005,
                    "apart_seconds": 0.01,
                    "times": 2.0,
                    "together_bytes": 1_000_000,
                    "apart_bytes": 8_000_000,
                }
            }
            for dtype in ("bfloat16", "float16")
        },
    },
    "chosen_speed": {
        "layer": [
            {
                "format": "q8",
                "tokens": 32768,
                "read_tokens": 2048,
                "exact_seconds": 0.005,
                "chosen_seconds": 0.001,
                "as_short_seconds": 0.0004,
                "times": 5.04,
            }
        ],
        "fits": [{"format": "q8", "tokens": 32768, "times": 0.99}],
        "model": [
            {
                "tokens": 32768,
                "read_tokens": 2048,
                "exact_seconds": 0.014,
                "chosen_seconds": 0.007,
                "times": 2.0,
            }
        ],
    },
    "chosen_quality": {
        "texts": ["code"],
        "before": 7168,
        "measured": 256,
        "loss": [
            {
                "model": "smollm2",
                "choice": "summaries",
                "share": 4,
                "loss_percent": 1.234,
                "standard_error_percent": 0.5,
            }
        ],
        "recall": [
            {"model": "smollm2", "task": "needle", "share": 1, "answers": 10, "right": 9},
            {"model": "smollm2", "task": "needle", "share": 4, "answers": 10, "right": 8},
        ],
        "mass": [{"model": "smollm2", "choice": "summaries", "layers": [0.9, 0.7]}],
    },
    "head_drafts": {
        "drafted": 4,
        "rows": [
            {
                "task": "stdlib-llama, source",
                "draft": "head",
                "rows": 8,
                "accepted_a_step": 1.23,
                "speed": 1.01,
                "bound": 1.85,
            }
        ],
    },
    "offloaded_contexts": {
        "before": 7168,
        "read_share": 8,
        "quality": [
            {
                "model": "smollm2",
                "kept": kept,
                "loss_percent": 0.84,
                "standard_error_percent": 0.5,
                "fetched": 42.4,
                "late": 6.0,
            }
            for kept in ("exact", "1/3 in memory, not waiting")
        ],
        "speed": [
            {"model": "smollm2", "kept": "exact", "of_exact": 1.0},
            {"model": "smollm2", "kept": "1/3 in memory, not waiting", "of_exact": 1.25},
        ],
    },
    "latent_attention": {
        "backend": "native",
        "step_heads": 8,
        "step_tokens": 512,
        **{
            dtype: {
                "step": {"seconds": 8e-4, "times_mlx_lm": 4.2},
                "decode_of_1_at_32k": {
                    "seconds": 0.5,
                    "operations_per_second": 1e11,
                    "times_mlx_lm": 46.0,
                    "times_numpy": 0.9,
                },
                "decode_of_8_at_32k": {
                    "seconds": 4.0,
                    "operations_per_second": 1e11,
                    "times_numpy": 0.9,
                },
            }
            for dtype in ("bfloat16", "float16")
        },
    },
    "quantised_kernels": {
        "backend": "native",
        **{
            name: {
                "fp16": {"seconds": 5e-5, "times_fp16": 1.0},
                "q8": {"seconds": 4e-5, "times_fp16": 1.25},
                "q4": {"seconds": 2.5e-5, "times_fp16": 2.004},
            }
            for name in (
                "decode_of_1_at_1k",
                "decode_of_8_at_1k",
                "decode_of_1_at_32k",
                "decode_of_8_at_32k",
                "prefill",
                "prompt_of_512",
            )
        },
        **{
            name: {
                each: {"prefill": prefill, "decode": 0.02, "recoding": 0.025}
                for each, prefill in (("fp16", 2.5), ("q8", 2.6), ("q4", 2.75))
            }
            for name in ("model_of_1", "model_of_8")
        },
        "mlx_lm_of_1_at_32k": {"times_mlx_lm": 1446.9},
    },
    "host_cost": {
        "layers": 24,
        "rows": [
            {
                "backend": "metal",
                "batch": 8,
                "context": 300,
                "mlx_lm_microseconds": 80.0,
                "paged_microseconds": 100.0,
                "paged_over_mlx_lm": 1.25,
                "spread_of_mlx_lm": 1.01,
                "launches_a_layer": 1.0,
                "decode_characters": 7349,
            },
            {
                "backend": "metal, compiled",
                "batch": 8,
                "context": 300,
                "mlx_lm_microseconds": 80.0,
                "paged_microseconds": 40.0,
                "paged_over_mlx_lm": 0.5,
                "spread_of_mlx_lm": 1.01,
                "launches_a_layer": 1.0,
                "decode_characters": 7349,
                "uncompiled_microseconds": 100.0,
                "recording_steps": 8.0,
                "comparison_steps": 32.0,
            },
        ],
    },
    "gpu": {
        "checks": [{"check": "decode q4 float16", "error": 0.1, "at_most": 0.2, "passed": True}],
        "decode": [
            {
                "batch": 8,
                "context": 8192,
                "pages": "fp16",
                "mlx_lm_ms": 20.0,
                "paged_ms": 10.0,
                "times_as_fast": 2.0,
            }
        ],
        "prefill": [{"prompt": 8192, "mlx_lm_s": 0.2, "paged_s": 0.25, "times_as_fast": 0.8}],
    },
    "whole_model": {
        "backend": "native",
        "rows": [
            {
                "model": "stdlib-llama",
                "batch": 8,
                "context": 4096,
                "mlx_lm_tokens_per_second": 100.0,
                "paged_tokens_per_second": 250.0,
                "paged_over_mlx_lm": 2.5,
                "mlx_lm_waiting_over_mlx_lm": 0.9,
                "mlx_lm_attention_share": 0.8,
                "paged_attention_share": 0.3,
            }
        ],
    },
    "rings": {
        "backend": "native",
        "memory": [
            {
                "context": 4096,
                "write_chunk": 256,
                "mlx_lm_bytes": 2**20,
                "paged_bytes": 2**21,
            }
        ],
        "decode": [{}, {"context": 2048, "microseconds": 20.5}],
        "prefill": {
            "tokens": 8192,
            "mlx_lm_seconds": 30.0,
            "paged_seconds": 6.0,
            "mlx_lm_peak_bytes": 2**22,
            "paged_peak_bytes": 2**20,
        },
        "allocations": {"decoded": 10000, "allocations": 0},
    },
    "appended_rows": {
        "context": 32768,
        "decode_milliseconds": 80.0,
        "mlx_lm_decode_milliseconds": 100.0,
        "mlx_lm_over_paged": 1.25,
        "bytes": 2**20,
        "mlx_lm_bytes": 2**21,
        "bytes_over_mlx_lm": 0.5,
        "copied_bytes": 2**20,
        "rewrites": 1,
    },
    "eviction": {
        "agents": {
            "8": {
                "states": {"27": {"lru": 0.25, "worth": 0.9, "foreseen": 0.95}},
                "pages": {"900": {"lru": 0.2, "lfu": 0.1, "fifo": 0.15, "worth": 0.3, "most": 0.5}},
            }
        },
        "mooncake": {
            "states": {"500": {"lru": 0.1, "worth": 0.2, "foreseen": 0.3}},
            "pages": {"8000": {"lru": 0.1, "lfu": 0.1, "fifo": 0.1, "worth": 0.2, "most": 0.4}},
        },
    },
    "replicas": {
        "ray": "2.60.0",
        "simulated": {
            "conversations": {
                "one_replica": 0.2157,
                "16": {
                    name: {
                        "found": found,
                        "waited_seconds": {"mean": 6.0, "p50": 3.5, "p99": 31.0},
                        "busiest_over_mean": 1.05,
                    }
                    for name, found in (("power_of_two", 0.054), ("prefix", 0.18))
                },
            }
        },
        "router": {
            "replicas": 64,
            "requests_per_second": 3000,
            "choose_seconds": {"p50": 0.00016, "p99": 0.00045},
            "beginnings": 131072,
            "bytes": 36 * 2**20,
        },
        "first_token": {
            "median_seconds": {"alone": 0.05, "power_of_two": 0.08, "prefix": 0.082},
            "added_by_ray_serve": 0.03,
            "added_by_prefix_router": 0.0015,
        },
    },
    "state_reuse": {
        "tokens": 8192,
        "other_tokens": 1000,
        "files": {
            "mamba": {
                "cold_seconds": 8.0,
                "repeated_seconds": 0.01,
                "mlx_lm_repeated_seconds": 0.012,
                "cold_over_repeated": 800.0,
                "parted_tokens_found": 6144,
                "mlx_lm_parted_tokens_found": 0,
                "kept_bytes": 2**20,
            }
        },
    },
    "prefix_reuse": {
        "backend": "native",
        "time_to_first_token": {
            "common_tokens": 3500,
            "new_tokens": 32,
            "mlx_lm_cold_seconds": 20.0,
            "mlx_lm_warm_seconds": 0.2,
            "paged_cold_seconds": 4.0,
            "paged_warm_seconds": 0.125,
        },
        "conversation": {"turns": 20, "share_found": 0.96},
        "together": {
            "requests": 32,
            "own_tokens": 16,
            "prefix_tokens": 2048,
            "mlx_lm_seconds": 20.0,
            "paged_seconds": 5.0,
            "most_blocks_used": 41,
            "blocks_of_one_prefix": 8,
            "blocks_of_tails": 32,
        },
        "fork": {"tokens": 32768, "seconds": 1e-4},
        "look_up": {"tokens": 8192, "blocks": 100_000, "seconds": 1e-3},
    },
    "page_codecs": {
        "tokens": 2048,
        "centre_percent": {
            name: {"keys": 63.4, "values": 14.2} for name in ("smollm2", "gemma3-270m")
        },
        "rows": [
            {
                "model": name,
                "cache": "q4",
                "bits": 4.65,
                "loss_percent": 0.171,
                "standard_error_percent": 0.127,
                "kl_mean": 1.1e-3,
            }
            for name in ("smollm2", "gemma3-270m")
        ],
    },
    "real_model_quality": {
        "rows": [
            {
                "model": "smollm2",
                "tokens": 2048,
                "cache": cache,
                "loss_percent": loss,
                "standard_error_percent": 0.14,
                "by_text": {"code": 0.87, "prose": 0.71, "chat": 0.66},
                "equal_percent": 95.54,
                "kl_mean": 0.0123,
                "kl_99": 0.2,
            }
            for cache, loss in (("fp16", 0.0), ("q8", 0.02), ("q8/q4", 0.13), ("q4", 0.75))
        ],
    },
    "real_tokens": {
        "rows": [
            {
                "model": "smollm2",
                "dtype": "float16",
                "side": "pages, batch",
                "prompts": 8,
                "tokens": 250,
                "prompts_that_differ": 1,
                "largest_gap": 0.0123,
            }
        ],
    },
    "real_recall": {
        "rows": [
            {
                "model": "smollm2",
                "task": task,
                "tokens": tokens,
                "cache": cache,
                "answers": 15,
                "right": right,
                "right_of_exact": right - 1 if cache != "fp16" else right,
                "tokens_percent": 97.5,
            }
            for task in ("needle", "call")
            for tokens in (1024, 4096)
            for cache, right in (("fp16", 12), ("q4", 10), ("mlx-lm 4 bits", 3))
            if tokens == 1024 or cache != "mlx-lm 4 bits"
        ]
    },
    "page_store": {
        "prompt_tokens": 4096,
        "first_token": {
            "float32": {
                "cold_seconds": 5.0,
                "disk_seconds": 0.25,
                "cold_over_disk": 20.0,
                "open_and_close_seconds": 0.1,
                "share_left_in_page_cache": 0.0,
                "logits_are_equal": True,
            }
        },
        "throughput": {
            "share_left_in_page_cache": 0.0,
            **{
                f"{name}_bytes_per_second": 5e8
                for name in ("plain_write", "store_write", "plain_read", "store_read")
            },
            "store_read_from_page_cache_bytes_per_second": 2e9,
        },
        "bytes_per_token": {"q4": {"disk": 880.0, "memory": 864.0}},
    },
    "page_store_faults": {
        "killed": {
            "cycles": 1000,
            "cap": 8388608,
            "most_bytes": 7000000,
            "reads": 30000,
            "wrong_reads": 0,
        },
        "damaged": {"files": 10000, "accepted": 0},
    },
    "store_writes": {
        "rules": ["everything", "second sight"],
        "loads": {
            "chat": {
                "memory": {
                    tokens: {
                        "second sight": {"bytes": 0.25, "hits": 0.987},
                        "second sight, 16,384 tokens at once": {"bytes": 0.5, "hits": hits},
                    }
                    for tokens, hits in (("32768", 1.187), ("131072", 1.007), ("524288", 0.987))
                }
            },
        },
    },
    "tiers": {
        "read": {"redis_bytes_per_second": 6e8, "folder_bytes_per_second": 2e9},
        "first_token": {
            "prompt_tokens": 8192,
            "found_seconds": 0.4,
            "computed_seconds": 4.0,
            "computed_over_found": 10.0,
        },
        "other_server": {
            "prompt_tokens": 4096,
            "running": 8,
            "alone": {"quiet": 2.0, "processor": 2.2, "busy": 2.5, "lost": 0.9},
            "handed": {"quiet": 2.1, "processor": 0.3, "busy": 3.5, "lost": -0.1},
            "first_token_over_alone": 1.05,
        },
    },
    "tier_faults": {
        "servers": {"kills": 100, "reads": 3000, "wrong": 0, "longest_seconds": 0.12},
        "writers": {"kills": 100, "reads": 900, "wrong": 0},
        "forged": {"entries": 10000, "accepted": 0},
    },
    "step_lengths": {
        "tokens": 1100,
        "contexts": 4,
        "rows": {
            name: {
                "fp16": {"7": {"logits": 9.4e-6, "given": 8e-6, "likeliest": 0, "numbers": 1e-5}},
                "q8": {
                    "7": {
                        "logits": 3e-3,
                        "given": 8.1e-6,
                        "likeliest": 1,
                        "numbers": 2.7e-3,
                        "codes": 642,
                        "of_codes": 6_291_456,
                        "scales": 20,
                        "of_scales": 196_608,
                    }
                },
            }
            for name in ("stdlib-llama", "stdlib-gemma3")
        },
    },
    "speculation": {
        "context": 2048,
        "draft_layers": 5,
        "look_up": {
            "a list to continue_8": {
                "tokens": 1024,
                "seconds_without": [4.0, 5.0, 6.0],
                "seconds_with": [4.0, 4.0, 4.0],
                "speed": 1.25,
                "spread_without": 0.1,
                "drafts": 200,
                "draft_tokens": 800,
                "accepted_tokens": 600,
            }
        },
        "model": {
            "8": {
                "tokens": 192,
                "seconds_mlx_lm": [8.0, 8.0, 8.0],
                "seconds_batch": [4.0, 4.0, 4.0],
                "speed": 2.0,
                "spread_mlx_lm": 0.1,
                "accepted_a_step": 0.44,
                "mlx_lm_accepted_a_step": 0.41,
            }
        },
    },
    "structured output": {
        "suite": {
            "schemas": 366,
            "taken": 349,
            "ended_texts": 95,
            "invalid_texts": 0,
            "refused": {"contains": 17},
        }
    },
    **FAMILY_FIGURES,
}
