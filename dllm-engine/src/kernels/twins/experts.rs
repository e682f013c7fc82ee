//! Twins of router.cu, moe_route.cu, moe_gate_up.cu and moe_down.cu.

use super::products::{gelu, matmul};

/// The router's logits: zr [rows][hidden] times wr [experts][hidden].
pub fn router_logits(zr: &[f32], wr: &[f32], hidden: usize) -> Vec<f64> {
    matmul(wr, zr, hidden)
}

/// The `used` largest logits of each row (of equal ones the lowest id first), and p / sum of the chosen p * scale[id] with
/// p = softmax(logits).
pub fn pick(logits: &[f64], experts: usize, used: usize, scale: Option<&[f32]>) -> (Vec<i32>, Vec<f64>) {
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for row in logits.chunks_exact(experts) {
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|a, b| row[*b].total_cmp(&row[*a])); // stable: equal ones keep their order
        let chosen = &order[..used];
        let p: Vec<f64> = chosen.iter().map(|id| (row[*id] - row[chosen[0]]).exp()).collect();
        let total: f64 = p.iter().sum();
        for (id, p) in chosen.iter().zip(&p) {
            ids.push(*id as i32);
            weights.push(p / total * scale.map_or(1.0, |scale| f64::from(scale[*id])));
        }
    }
    (ids, weights)
}

/// Offsets [experts + 1] and the indices into `ids`, grouped by expert. Ids outside the experts are left out.
pub fn route(ids: &[i32], experts: usize) -> (Vec<i32>, Vec<i32>) {
    let (mut offsets, mut order) = (vec![0], Vec::new());
    for expert in 0..experts as i32 {
        order.extend((0..ids.len() as i32).filter(|i| ids[*i as usize] == expert));
        offsets.push(order.len() as i32);
    }
    (offsets, order)
}

/// Weights of all experts, [n][k] each.
pub type Experts = Vec<Vec<f32>>;

/// gelu(gate x) * (up x) / 16 for every choice of every row, [rows * used][width]; zeros where the id is no expert.
pub fn gate_up(x: &[f32], ids: &[i32], used: usize, gates: &Experts, ups: &Experts, k: usize) -> Vec<f64> {
    let width = gates[0].len() / k;
    let mut out = Vec::with_capacity(ids.len() * width);
    for (i, id) in ids.iter().enumerate() {
        let x = &x[i / used * k..][..k];
        match usize::try_from(*id).ok().filter(|e| *e < gates.len()) {
            Some(e) => {
                let (g, u) = (matmul(&gates[e], x, k), matmul(&ups[e], x, k));
                out.extend(g.iter().zip(u).map(|(g, u)| gelu(*g) * u / 16.0));
            }
            None => out.resize(out.len() + width, 0.0),
        }
    }
    out
}

/// weights[i] * 16 * (down act[i]), [rows * used][n]; zeros where the id is no expert.
pub fn down(act: &[f32], ids: &[i32], weights: &[f32], downs: &Experts, width: usize) -> Vec<f64> {
    let n = downs[0].len() / width;
    let mut out = Vec::with_capacity(ids.len() * n);
    for (i, id) in ids.iter().enumerate() {
        match usize::try_from(*id).ok().filter(|e| *e < downs.len()) {
            Some(e) => {
                let product = matmul(&downs[e], &act[i * width..][..width], width);
                out.extend(product.iter().map(|v| v * 16.0 * f64::from(weights[i])));
            }
            None => out.resize(out.len() + n, 0.0),
        }
    }
    out
}
