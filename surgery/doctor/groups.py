"""What `surgery doctor --bench` measures, by name: the fields of a Benchmark."""

GROUPS = (
    *("ssd_forward", "ssd_forward_backward", "selective_scan_forward", "selective_scan_forward_backward"),
    *("graft_attention_forward", "graft_attention_forward_backward", "causal_conv_forward", "causal_conv_forward_backward"),
    *("rms_norm_forward", "rms_norm_forward_backward", "kl_divergence_forward", "ssd_step_forward", "selective_step_forward"),
    *("prefill", "hybrid_prefill", "hybrid_decode", "locate_exact", "locate_confirmed", "tune_step"),
)
