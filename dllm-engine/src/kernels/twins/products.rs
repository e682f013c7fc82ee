//! Twins of the matrix products and of what stands between them: quant_mm.cu, repack.cu, dense.cu.

use half::f16;

/// out[row][c] = sum over i of x[row][i] * w[c][i]; w [n][k], x [rows][k].
pub fn matmul(w: &[f32], x: &[f32], k: usize) -> Vec<f64> {
    let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
    x.chunks_exact(k).flat_map(|x| w.chunks_exact(k).map(move |w| dot(x, w))).collect()
}

/// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
pub fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)).tanh())
}

/// gelu(x[row][c]) * x[row][n + c] of x [rows][2 n].
pub fn geglu(x: &[f64], n: usize) -> Vec<f64> {
    x.chunks_exact(2 * n).flat_map(|row| (0..n).map(|c| gelu(row[c]) * row[n + c])).collect()
}

/// The nearest half, at most 65504 in size.
pub fn to_half(x: f32) -> f16 {
    f16::from_f32(x.clamp(-65_504.0, 65_504.0))
}

/// As `to_half`, of a result.
pub fn clamp_half(x: f64) -> f64 {
    x.clamp(-65_504.0, 65_504.0)
}
