"""Figures printed in the papers, as numbers; `claims.PAPERS` has their names. FA1's are of its arXiv version 2."""

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)

# FA1 Tables 11, 14 and 20: ms of forward and backward on an A100-40GB; batch 16, 8 heads, head_dim 64, fp16. Missing
# lengths: out of memory.
FA1_MS: dict[tuple[str, str], dict[int, float]] = {
    key: dict(zip(LENGTHS, values, strict=False))
    for key, values in {
        ("padding+dropout", "standard"): (0.84, 0.86, 2.35, 8.29, 31.75, 124.19),
        ("padding+dropout", "flash"): (
            0.43, 0.41, 0.95, 2.55, 9.56, 37.49, 147.75, 586.61, 2339.11, 9341.30,
        ),
        ("padding", "standard"): (0.80, 0.81, 2.08, 7.23, 27.51, 107.58),
        ("padding", "flash"): (0.32, 0.30, 0.83, 2.37, 7.95, 30.77, 119.98, 473.65, 1883.43, 7513.01),
        ("plain", "standard"): (0.67, 0.70, 1.18, 3.67, 13.22, 50.44),
        ("plain", "flash"): (0.31, 0.31, 0.73, 2.29, 7.64, 30.09, 118.50, 470.51, 1876.08, 7492.85),
    }.items()
}  # fmt: skip

# FA1 Table 21: peak MiB, forward and backward, same shape.
FA1_MIB = {
    "standard": dict(zip(LENGTHS, (36, 104, 336, 1184, 4416, 17024), strict=False)),
    "flash": dict(zip(LENGTHS, (22, 44, 104, 209, 418, 836, 1672, 3344, 6688, 13376), strict=False)),
}

# FA1 Table 2: days for 400k steps of 512 sequences of 1024 on eight A100s, Hugging Face over FlashAttention.
GPT2_TOKENS = 400_000 * 512 * 1024
GPT2_SPEEDUP = {"gpt2_small": 9.5 / 2.7, "gpt2_medium": 21.0 / 6.9}
# FA1 Table 4: days of GPT-2 small by context, equal tokens; and those of Megatron-LM at 1024.
CONTEXT_DAYS = {1024: 2.7, 2048: 3.0, 4096: 3.6}
MEGATRON_DAYS = 4.7

# FA1 section 4.3, Figure 3: the tokens between which Linformer overtakes FlashAttention.
LINFORMER_OVERTAKES = (512, 1024)

# FA1 Table 3, ListOps: accuracy of standard attention and of the contender.
LISTOPS_ACCURACY = {"flash": (0.360, 0.376), "flash+butterfly": (0.360, 0.370)}

# FA1 Table 7, time of Apex's FMHA, which stores the probabilities, over FlashAttention's: length -> phase -> ratio.
STORED_OVER_FLASH = {
    128: {"forward": 0.10 / 0.08, "backward": 0.17 / 0.20, "both": 0.27 / 0.28},
    256: {"forward": 0.29 / 0.22, "backward": 0.52 / 0.53, "both": 0.81 / 0.75},
    512: {"forward": 1.14 / 0.81, "backward": 1.81 / 2.00, "both": 2.95 / 2.81},
}

# FA1 Figure 2 left, both versions of the paper: GPT-2 medium, length 1024, 16 heads, head_dim 64, batch 64, A100.
FIGURE_2 = {
    "arXiv v2": {"standard_gb": 40.3, "flash_gb": 4.4, "standard_ms": 41.7, "flash_ms": 7.3},
    "NeurIPS 2022": {"standard_gb": 35.3, "flash_gb": 4.4, "standard_ms": 35.1, "flash_ms": 11.7},
}
FIGURE_2_HEADS = 64 * 16
FIGURE_2_FLOPS_RATIO = 75.2 / 66.6
# FA1 Figure 2 middle: keys per tile (B_c) -> GB and ms of the forward, same shape as Figure 2 left.
FIGURE_2_TILES = {
    64: {"gb": 6.58, "ms": 8.6},
    128: {"gb": 3.36, "ms": 4.7},
    256: {"gb": 1.74, "ms": 3.3},
    512: {"gb": 0.94, "ms": 3.2},
}
# FA1 Figure 2 right: length 4096, percent of non-zero blocks -> ms; dense 188 ms (read off the vector graphics).
FIGURE_2_SPARSE_MS = {10: 27, 20: 43, 30: 60, 40: 81, 50: 99, 60: 117, 70: 136, 80: 156, 90: 176}
FIGURE_2_DENSE_MS = 188
# FA1 Tables 11 and 20, length 65536: time of dense over block-sparse FlashAttention.
BLOCK_SPARSE_SPEEDUP_64K = {"plain": 7492.85 / 50.39, "padding+dropout": 9341.30 / 64.11}

# OS Figure 3, batch 4000: the length and, by k, the time of safe softmax followed by top-k, over that of both fused.
TOPK_LENGTH = 25000
# Online normalizer calculation, Figures 1, 2 and 4, read off: online over safe, of 4000 rows from 4000 elements on,
# and of ten rows; of ten rows with top-k, k 5.
SOFTMAX_OF_4000, SOFTMAX_OF_TEN, TOPK_OF_TEN = 1.3, 1.15, (1.5, 2.5)
TOPK_SPEEDUP = {5: 5.0, 10: 3.5, 15: 2.0, 30: 1.4}

# FA2 Table 1, GPT3-1.3B: context -> TFLOP/s per A100 without flash attention and with FlashAttention-2.
GPT3_TFLOPS = {2048: (142, 196), 8192: (72, 220)}

TOKENS_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def _by_length(table: dict[tuple[int, bool], dict[str, tuple[int, ...]]]) -> dict[tuple[int, bool], dict]:
    """(head_dim, causal) -> series -> length -> TFLOP/s."""
    return {
        key: {name: dict(zip(TOKENS_LENGTHS, rates, strict=True)) for name, rates in series.items()}
        for key, series in table.items()
    }


# FA2 Figure 7, H100, forward and backward, TFLOP/s; 16k tokens, hidden 2048: (head_dim, causal) -> series -> length.
FA2_H100 = _by_length({
    (64, False): {"fa1": (157, 159, 161, 161, 166, 168), "fa2": (215, 254, 274, 288, 294, 296)},
    (64, True): {"fa1": (104, 123, 136, 138, 149, 156), "fa2": (141, 192, 232, 257, 273, 284)},
    (128, False): {"fa1": (127, 127, 128, 131, 137, 139), "fa2": (248, 294, 320, 326, 335, 338)},
    (128, True): {"fa1": (98, 109, 108, 126, 135, 137), "fa2": (163, 221, 265, 294, 308, 328)},
})  # fmt: skip

# FA3 Figure 5, H100, forward, TFLOP/s, same workload.
FA3_FORWARD = _by_length({
    (64, False): {"fa2": (282, 306, 318, 321, 322, 324), "fa3": (333, 392, 460, 476, 496, 497)},
    (64, True): {"fa2": (180, 229, 262, 284, 295, 299), "fa3": (197, 265, 371, 420, 460, 473)},
    (128, False): {"fa2": (309, 350, 362, 368, 370, 370), "fa3": (467, 565, 625, 638, 646, 648)},
    (128, True): {"fa2": (191, 260, 298, 319, 333, 335), "fa3": (292, 423, 521, 579, 602, 616)},
    (256, False): {"fa2": (275, 313, 321, 323, 324, 326), "fa3": (482, 627, 707, 736, 746, 756)},
    (256, True): {"fa2": (208, 251, 278, 293, 297, 298), "fa3": (286, 427, 537, 612, 628, 642)},
})  # fmt: skip
# FA3 Figure 6, H100, backward, TFLOP/s.
FA3_BACKWARD = _by_length({
    (64, False): {"fa2": (198, 238, 264, 279, 287, 291), "fa3": (272, 363, 422, 453, 472, 474)},
    (128, False): {"fa2": (214, 260, 291, 310, 318, 322), "fa3": (316, 424, 501, 542, 559, 561)},
})  # fmt: skip

# What FA3's 75 % are of: TFLOP/s of an H100 SXM's tensor cores in 16 bits, and an H200's, at this clock.
H100_PEAK, H100_MHZ = 989, 1830

# FA3 Table 3: RMSE against float64, fp16, values N(0, 1) + N(0, 100) * Bernoulli(0.001).
FA3_RMSE = {"standard": 3.2e-4, "flash": 1.9e-4}
# The same in FP8, by how the operands are quantised.
FA3_FP8_RMSE = {"per tensor": 2.4e-2, "block": 2.4e-2, "incoherent": 9.3e-3, "block and incoherent": 9.1e-3}
