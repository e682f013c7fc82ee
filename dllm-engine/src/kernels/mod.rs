//! The engine's own kernels: what a graph or a host loop computes that ggml has no operation for.

pub mod position_stats;
