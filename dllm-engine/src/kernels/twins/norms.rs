//! Twins of norms.cu. Matrices are [rows][hidden]; results are not rounded.

use super::wide;

/// x / sqrt(mean(x^2) + eps) of one row.
pub fn rms(x: &[f64], eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let inverse = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().map(|x| x * inverse).collect()
}

/// `rms(x) * weight`.
pub fn rms_weighted(x: &[f64], weight: &[f32], eps: f32) -> Vec<f64> {
    rms(x, eps).iter().zip(weight).map(|(x, w)| x * f64::from(*w)).collect()
}

/// `rms(pre_scale * x; weight)`.
pub fn rms_norm(x: &[f32], weight: Option<&[f32]>, pre_scale: f32, eps: f32, hidden: usize) -> Vec<f64> {
    let row = |row: &[f32]| {
        let scaled: Vec<f64> = row.iter().map(|x| f64::from(*x) * f64::from(pre_scale)).collect();
        match weight {
            Some(weight) => rms_weighted(&scaled, weight, eps),
            None => rms(&scaled, eps),
        }
    };
    x.chunks_exact(hidden).flat_map(row).collect()
}

/// Input of the stack and of its first layer.
#[derive(Debug, Clone, Copy)]
pub struct NormInput<'a> {
    pub e: &'a [f32],
    pub e_scale: f32,
    /// Self-conditioning signal and its factor per row (`None`: 1).
    pub signal: Option<&'a [f32]>,
    pub flag: Option<&'a [f32]>,
    /// Rows that are not normed; `None`: no row is causal.
    pub causal: Option<&'a [i32]>,
    pub attn_norm: &'a [f32],
    pub eps: f32,
}

impl NormInput<'_> {
    /// h and x1. A row whose factor is 0 does not look at its signal.
    pub fn compute(&self) -> (Vec<f64>, Vec<f64>) {
        let hidden = self.attn_norm.len();
        let (mut h, mut x1) = (Vec::new(), Vec::new());
        for (i, e) in self.e.chunks_exact(hidden).enumerate() {
            let factor = f64::from(self.flag.map_or(1.0, |flag| flag[i]));
            let mut x: Vec<f64> = e.iter().map(|e| f64::from(*e) * f64::from(self.e_scale)).collect();
            if let Some(signal) = self.signal.filter(|_| factor != 0.0) {
                x.iter_mut().zip(&signal[i * hidden..]).for_each(|(x, s)| *x += factor * f64::from(*s));
            }
            let row = if self.causal.is_some_and(|causal| causal[i] != 0) { x } else { rms(&x, self.eps) };
            x1.extend(rms_weighted(&row, self.attn_norm, self.eps));
            h.extend(row);
        }
        (h, x1)
    }
}

/// What follows the attention block.
#[derive(Debug, Clone, Copy)]
pub struct NormAttnOut<'a> {
    pub h: &'a [f32],
    pub a: &'a [f32],
    pub post_attention_norm: &'a [f32],
    pub ffn_norm: &'a [f32],
    pub pre_ffw_norm_2: &'a [f32],
    pub router_scale: &'a [f32],
    pub eps: f32,
}

impl NormAttnOut<'_> {
    /// r, x, y and zr.
    pub fn compute(&self) -> [Vec<f64>; 4] {
        let hidden = self.ffn_norm.len();
        let mut out = [const { Vec::new() }; 4];
        for (h, a) in self.h.chunks_exact(hidden).zip(self.a.chunks_exact(hidden)) {
            let a = rms_weighted(&wide(a), self.post_attention_norm, self.eps);
            let r: Vec<f64> = h.iter().zip(a).map(|(h, a)| f64::from(*h) + a).collect();
            out[1].extend(rms_weighted(&r, self.ffn_norm, self.eps));
            out[2].extend(rms_weighted(&r, self.pre_ffw_norm_2, self.eps));
            let root = (hidden as f64).sqrt();
            out[3].extend(rms_weighted(&r, self.router_scale, self.eps).iter().map(|z| z / root));
            out[0].extend(r);
        }
        out
    }
}

/// The end of a layer.
#[derive(Debug, Clone, Copy)]
pub struct NormLayerOut<'a> {
    pub r: &'a [f32],
    pub d: &'a [f32],
    /// Part p of row i starts at element `i * strides[0] + p * strides[1]`.
    pub m: &'a [f32],
    pub parts: usize,
    pub strides: [usize; 2],
    pub post_ffw_norm_1: &'a [f32],
    pub post_ffw_norm_2: &'a [f32],
    pub post_ffw_norm: &'a [f32],
    /// The layer's scalar for canvas rows and for causal ones.
    pub scales: [f32; 2],
    pub causal: Option<&'a [i32]>,
    pub next_norm: &'a [f32],
    pub eps: f32,
}

impl NormLayerOut<'_> {
    /// h_next and x_next.
    pub fn compute(&self) -> (Vec<f64>, Vec<f64>) {
        let hidden = self.next_norm.len();
        let (mut h_next, mut x_next) = (Vec::new(), Vec::new());
        for (i, (r, d)) in self.r.chunks_exact(hidden).zip(self.d.chunks_exact(hidden)).enumerate() {
            let part = |p: usize| &self.m[i * self.strides[0] + p * self.strides[1]..][..hidden];
            let m: Vec<f64> = (0..hidden).map(|c| (0..self.parts).map(|p| f64::from(part(p)[c])).sum()).collect();
            let d = rms_weighted(&wide(d), self.post_ffw_norm_1, self.eps);
            let m = rms_weighted(&m, self.post_ffw_norm_2, self.eps);
            let both: Vec<f64> = d.iter().zip(m).map(|(d, m)| d + m).collect();
            let f = rms_weighted(&both, self.post_ffw_norm, self.eps);
            let s = f64::from(self.scales[usize::from(self.causal.is_some_and(|causal| causal[i] != 0))]);
            let h: Vec<f64> = r.iter().zip(f).map(|(r, f)| (f64::from(*r) + f) * s).collect();
            x_next.extend(rms_weighted(&h, self.next_norm, self.eps));
            h_next.extend(h);
        }
        (h_next, x_next)
    }
}
