//! stub
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DenoiseSettings { pub max_steps: u32, pub t_min: f32, pub t_max: f32, pub entropy_bound: f32, pub stability_threshold: Option<u32>, pub confidence_threshold: Option<f32> }
