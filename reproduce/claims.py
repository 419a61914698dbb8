"""The papers' claims, C1 to C33: statement, source, the paper's figure, and the experiment here that measures it."""

from dataclasses import dataclass

# How the papers are abbreviated, here and in the report.
PAPERS = {
    "FA1": "FlashAttention (arXiv 2205.14135)",
    "FA2": "FlashAttention-2 (2307.08691)",
    "FA3": "FlashAttention-3 (2407.08608)",
    "OS": "Online normalizer calculation for softmax (1805.02867)",
}


@dataclass(frozen=True)
class Claim:
    """A claim, and how it is tested.

    Attributes:
        name: "C1" to "C33".
        source: the paper (see PAPERS), and its figure, table or section.
        statement: the claim, in a sentence.
        paper: the paper's figure, shown when ours is not measured.
        experiment: the experiment that measures it.
        on_gpu: the part of it that only a GPU can measure; empty if a CPU's figures are as good.
    """

    name: str
    source: str
    statement: str
    paper: str
    experiment: str
    on_gpu: str = ""


_ALL = (
    Claim("C1", "FA1 Theorem 1", "Attention is computed exactly: output and gradients.", "at most 2x naive's error",
          "numerics", "errors against float64 with tensor cores"),
    Claim("C2", "FA3 Table 3", "With outliers, flash attention in fp16 is more accurate than standard attention.",
          "1.7x (3.2e-4 / 1.9e-4)", "numerics", "RMSE with outliers, with tensor cores"),
    Claim("C3", "FA1 Figure 2 left", "More FLOPs, fewer bytes of memory traffic, less time.",
          "bytes 9.2x (NeurIPS: 8.0x), time 5.7x (NeurIPS: 3.0x)", "traffic", "DRAM bytes and time, standard/flash"),
    Claim("C4", "FA1 Figure 2 middle", "Larger tiles move fewer bytes and take less time, up to a point.",
          "6.58, 3.36, 1.74, 0.94 GB and 8.6, 4.7, 3.3, 3.2 ms at B_c 64, 128, 256, 512",
          "history", "time of FlashAttention's own loop order against its tile"),
    Claim("C5", "FA1 Figure 2 right, Proposition 4", "Block-sparse time is affine in the share of non-zero blocks.",
          "0.14 to 0.93 of dense at 10 to 90 %", "sparse", "time against the share of blocks, 4096 tokens"),
    Claim("C6", "FA1 Figure 1 right", "Mask, softmax and dropout dominate the standard forward.",
          "76 % of 16.8 ms; 7.6x faster fused", "traffic", "time of each pass of the standard forward"),
    Claim("C7", "FA1 Figure 3 left, Tables 9-20", "Faster than standard attention at every length; quadratic in it.",
          "3.3x with mask and dropout, 1.6 to 1.7x plain, at 1k to 4k", "attention", "time against length"),
    Claim("C8", "FA1 Figure 3 right, Table 21", "Memory grows linearly with length, up to 20x less than standard.",
          "5.7x, 10.6x, 20.4x at 1k, 2k, 4k; 13.1 GiB at 64k", "attention", "peak memory against length"),
    Claim("C9", "FA1 Figure 3, section 4.3", "Approximate attention overtakes exact flash attention at some length.",
          "between 512 and 1024 tokens for Linformer", "attention", "length from which Linformer is faster"),
    Claim("C10", "FA1 Tables 11, 20", "Block-sparse FlashAttention is the fastest of all, and linear in length.",
          "149x over dense at 64k", "sparse", "butterfly mask against length"),
    Claim("C11", "FA1 Table 2", "GPT-2 trains up to 3.5x faster than Hugging Face's, 1.7x than Megatron-LM's.",
          "3.5x (small), 3.0x (medium)", "training", "tokens/s, attention swapped alone and the whole stack"),
    Claim("C12", "FA1 Table 2, Figure 4", "The loss curve and the perplexity are those of standard attention.",
          "18.2 (small), 14.3 (medium), after 400k steps", "perplexity", "loss curves of every backend"),
    Claim("C13", "FA1 Table 4", "At 4k context still faster than Megatron at 1k.",
          "time 1 : 1.11 : 1.33 at 1k, 2k, 4k; 1.3x", "training", "tokens/s against context"),
    Claim("C14", "FA1 Table 4", "Longer context gives better perplexity.", "18.2, 17.6, 17.5 at 1k, 2k, 4k",
          "perplexity", "validation loss against context, same targets"),
    Claim("C15", "FA1 Table 1", "BERT-large trains 15 % faster than the MLPerf 1.1 record.", "17.4 min, 20.0 before",
          "encoders", "a step of BERT-large, not the run to 72 % on eight A100s"),
    Claim("C16", "FA1 Tables 3, 5, 6", "Long-range tasks run 2.4x faster (2.8x block-sparse); Path-X is solved.",
          "2.4x, 2.8x; 61.4 % on Path-X", "encoders", "ListOps, step and accuracy; a step at Path-X's length"),
    Claim("C17", "FA1 README", "At head_dim 128 the speed-up is lower, and largest when causal.",
          "1.0 to 2.1x plain, 2.4 to 3.3x causal", "attention", "standard/flash time at head_dim 128"),
    Claim("C18", "FA2 Figures 4-7", "FlashAttention-2 is about twice as fast as FA1.", "1.36 to 2.50x on an H100",
          "history", "time of its loop order over FlashAttention-2's; of split keys over split queries"),
    Claim("C19", "FA2 section 3.2", "Parallelism over the sequence helps where batch * heads is small.",
          "up to min(SMs, B H T_r) / (B H)", "history", "time with one program per head over many"),
    Claim("C20", "FA2 section 3.1", "Skipping blocks above the diagonal makes causal attention faster.",
          "1.7 to 1.8x over full", "attention", "full over causal time"),
    Claim("C21", "FA2 section 3.1", "Saving the log-sum-exp alone and dividing once at the end suffices.",
          "same gradients, a little faster", "history", "time with maximum and sum, and of dividing each step"),
    Claim("C22", "FA1 Algorithm 4", "One backward pass with D = rowsum(dO * O) instead of two passes.",
          "5 matrix products instead of 7", "history", "time of the backward in two passes over one"),
    Claim("C23", "FA2 Table 1", "GPT-3-sized models train 1.4x to 3.1x faster than without flash attention.",
          "196 and 220 TFLOP/s per A100 at 2k and 8k (1.3B)", "training", "MFU and speed-up at 1.3B parameters"),
    Claim("C24", "FA3 Figures 5, 6", "Up to 75 % of an H100's peak, 1.5 to 2.0x FlashAttention-2.",
          "496 (d64), 646 (d128), 746 (d256) TFLOP/s forward at 8k", "attention", "TFLOP/s against length"),
    Claim("C25", "FA3 Table 2", "Warp specialisation and pipelining each help.", "661, 582 and 570 TFLOP/s",
          "history", "TFLOP/s with both, and without one of them"),
    Claim("C26", "FA3 Table 3", "Block quantisation and incoherent processing make FP8 2.6x more accurate.",
          "RMSE 9.1e-3, 2.4e-2 per-tensor", "numerics"),
    Claim("C27", "OS section 3, Figures 1-2", "Online softmax reads memory 3 times where safe softmax takes 4.",
          "1.3x faster", "history", "time of safe over online softmax"),
    Claim("C28", "OS Figures 3-4", "Fusing softmax with top-k is up to 5x faster.", "5x at K = 5",
          "history", "time of softmax and then top-k over one pass"),
    Claim("C29", "FA1 Theorem 2, Proposition 3", "Memory traffic is N^2 d^2 / M, asymptotically the least.",
          "the compulsory 4 N d where K and V stay on chip", "traffic", "DRAM bytes over compulsory"),
    Claim("C30", "FA1 Table 7", "Recomputing P is faster forward than storing it, slower backward, equal in total.",
          "-4 %, +8 %, +5 % at 128, 256, 512", "attention", "time with stored probabilities over ours"),
    Claim("C31", "FA1 appendix E.5", "With less on-chip memory the speed-up shrinks.",
          "lower on a T4 than on an A100", "traffic", "time of the forward against its tile"),
    Claim("C32", "FA1 appendix B.5", "Chunked attention with checkpointing saves memory, not time.",
          "flash 2 to 4x faster", "attention", "time of chunked attention over flash"),
    Claim("C33", "FA1 section 5", "Attention across GPUs is left to the future.", "none", "ring",
          "time and bytes between GPUs of one sequence on several"),
)  # fmt: skip

CLAIMS: dict[str, Claim] = {claim.name: claim for claim in _ALL}
