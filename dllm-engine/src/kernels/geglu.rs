//! gelu(gate) * up with the tanh form computed in F32. ggml's CPU backend reads its GELU from a half-precision table, which
//! moves logits by up to 0.1; level `reference` uses this op instead.
//!
//! Contract: sources gate and up, F32 of one shape with contiguous rows; destination F32 of that shape.

use llama_sys::ggml_tensor;

use crate::ggml::NodeOp;
use crate::kernels::{row, row_mut, share, source};

pub(crate) struct ExactGeglu;

/// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
fn gelu(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    0.5 * x * (1.0 + (SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)).tanh())
}

impl NodeOp for ExactGeglu {
    unsafe fn compute(&self, dst: &ggml_tensor, ith: usize, nth: usize) {
        // SAFETY: the node was made with two sources.
        let (gate, up) = unsafe { (source(dst, 0), source(dst, 1)) };
        let [_, n1, n2, n3] = dst.ne.map(|n| n as usize);
        for i in share(n1 * n2 * n3, ith, nth) {
            let (i1, i2, i3) = (i % n1, i / n1 % n2, i / n1 / n2);
            // SAFETY: F32 tensors of the destination's shape; each row belongs to one thread.
            let (out, g, u) =
                unsafe { (row_mut::<f32>(dst, i1, i2, i3), row::<f32>(gate, i1, i2, i3), row::<f32>(up, i1, i2, i3)) };
            for ((out, g), u) in out.iter_mut().zip(g).zip(u) {
                *out = gelu(*g) * u;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::gelu;

    #[test]
    fn gelu_is_the_tanh_form() {
        // Values of the formula in double precision.
        for (x, y) in
            [(0.0, 0.0), (1.0, 0.841_191_990), (-1.0, -0.158_808_010), (3.0, 2.996_362_60), (-3.0, -0.003_637_39)]
        {
            assert!((f64::from(gelu(x)) - y).abs() < 1e-6, "gelu({x}) = {}", gelu(x));
        }
    }
}
