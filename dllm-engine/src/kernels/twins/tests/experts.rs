//! router.cu, moe_route.cu, moe_gate_up.cu and moe_down.cu.

use half::f16;

use super::super::experts::{Experts, down, gate_up, pick, route, router_logits};
use super::super::gpu::{Gpu, NONE, launch};
use super::super::input::{Input, Matrix, block_types, single};
use super::super::wide;
use super::{EXACT, F16, Floats, close, gpu};
use crate::ggml::GgmlType;

/// Both factors are split into two numbers of 11 bits, which is as exact as F32. A softmax of such logits: their error, some
/// units in size, times the weight.
const WEIGHTS: f64 = 2e-5;

#[test]
fn the_router_is_its_twin() {
    let Some(gpu) = gpu() else { return };
    let shapes = [
        (1, 128, 2816, 8),
        (5, 8, 256, 2),
        (16, 4, 16, 1),
        (256, 128, 2816, 8),
        (300, 128, 272, 8),
        (37, 256, 1024, 16),
        (33, 160, 256, 4),
    ];
    for (rows, experts, hidden, used) in shapes {
        let mut input = Input::new(rows as u64);
        let zr = input.values(rows * hidden, 0.3);
        let mut wr = input.values(experts * hidden, 0.3);
        wr.copy_within(hidden..2 * hidden, 3 * hidden); // experts 1 and 3 are alike: equal logits
        let scale: Vec<f32> = (0..experts).map(|_| 0.5 + input.unit()).collect();
        let (zr_at, wr_at, scale_at) = (gpu.put(&zr), gpu.put(&wr), gpu.put(&scale));
        let scratch = gpu.poisoned::<u8>(gpu.kernels.router_scratch(rows, experts, hidden));
        let want = router_logits(&zr, &wr, hidden);
        let (r, e, h, u) = (rows as i32, experts as i32, hidden as i32, used as i32);
        // The second call finds the scratch as the first left it.
        for scale in [Some(&scale[..]), None] {
            let at = if scale.is_some() { scale_at.input() } else { NONE };
            let (ids, weights) = (gpu.poisoned::<i32>(rows * used), gpu.poisoned::<f32>(rows * used));
            let logits = gpu.poisoned::<f32>(rows * experts);
            let (i, w, l) = (ids.out(), weights.out(), logits.out());
            gpu.ran(launch!(gpu, dllm_router(zr_at.input(), wr_at.input(), at, r, e, h, u, i, w, l, scratch.out())));
            let (what, own) = (format!("router {rows} x {experts} x {hidden}, {used} chosen"), gpu.get(&logits));
            close(&format!("{what}: logits"), &own, &want, EXACT);
            // Exact against its own logits: which of two that differ by a rounding is larger is the kernel's to say.
            let (want_ids, want_weights) = pick(&wide(&own), experts, used, scale);
            assert_eq!(gpu.get(&ids), want_ids, "{what}");
            close(&format!("{what}: weights"), &gpu.get(&weights), &want_weights, WEIGHTS);
            let (by_twin, _) = pick(&want, experts, used, scale);
            let others = by_twin.iter().zip(&want_ids).filter(|(a, b)| a != b).count();
            assert!(others <= by_twin.len() / 100, "{what}: {others} choices differ from those by the twin's logits");
        }
    }
}

/// All logits equal: the lowest ids, and equal weights.
#[test]
fn of_equal_logits_the_router_takes_the_lowest_ids() {
    let Some(gpu) = gpu() else { return };
    let (zr, wr) = (gpu.put(&[1.0_f32; 3 * 32]), gpu.put(&[0.5_f32; 128 * 32]));
    let scratch = gpu.poisoned::<u8>(gpu.kernels.router_scratch(3, 128, 32));
    let (ids, weights) = (gpu.poisoned::<i32>(3 * 8), gpu.poisoned::<f32>(3 * 8));
    let (none, null) = (NONE, std::ptr::null_mut());
    let (i, w) = (ids.out(), weights.out());
    gpu.ran(launch!(gpu, dllm_router(zr.input(), wr.input(), none, 3, 128, 32, 8, i, w, null, scratch.out())));
    assert_eq!(gpu.get(&ids), [0, 1, 2, 3, 4, 5, 6, 7].repeat(3));
    close("weights", &gpu.get(&weights), &[0.125; 24], EXACT);
}

/// Ids of `rows` rows, each row's all different; a few are outside the experts, which the plan skips.
fn choices(input: &mut Input, rows: usize, used: usize, experts: usize) -> Vec<i32> {
    let mut ids: Vec<i32> = (0..rows).flat_map(|_| input.order(experts)[..used].to_vec()).map(|id| id as i32).collect();
    if ids.len() > 16 {
        (ids[3], ids[9]) = (-1, experts as i32);
    }
    ids
}

#[test]
fn the_plan_is_its_twin() {
    let Some(gpu) = gpu() else { return };
    for (rows, used, experts) in
        [(1, 1, 1), (1, 8, 128), (5, 2, 4), (16, 8, 128), (256, 8, 128), (300, 8, 128), (300, 3, 7)]
    {
        let ids = choices(&mut Input::new(rows as u64), rows, used, experts);
        let bytes = gpu.kernels.plan_bytes(ids.len(), experts);
        assert_eq!(bytes, 4 * (2 * experts + 1 + ids.len()));
        let (ids_at, plan) = (gpu.put(&ids), gpu.poisoned::<i32>(bytes / 4));
        gpu.ran(launch!(gpu, dllm_moe_route(ids_at.input(), ids.len() as i32, experts as i32, plan.out())));
        let (plan, (offsets, order)) = (gpu.get(&plan), route(&ids, experts));
        assert_eq!(plan[..=experts], offsets, "{rows} x {used} of {experts}");
        assert_eq!(plan[experts + 1..][..order.len()], order, "{rows} x {used} of {experts}");
        assert!(plan[experts + 1 + ids.len()..].iter().all(|count| *count == 0), "{rows} x {used} of {experts}");
    }
}

/// Shape of a mixture: rows, choices, experts, row length, width of an expert.
type Mixture = [usize; 5];

/// Both expert products of a routing, against the twin. The down product is checked on the activations that the first one
/// made, so that each has its own limit: the block types' (see products.rs) and a rounding to F16; gelu(gate) * up carries the
/// error of both factors.
fn products(gpu: &Gpu, types: [GgmlType; 2], shape: Mixture, overlap: i32, tile: i32) {
    let [rows, used, experts, hidden, width] = shape;
    let mut input = Input::new((rows + hidden) as u64);
    let matrices = |input: &mut Input, ty, n, k| -> Vec<Matrix> {
        (0..experts).map(|_| Matrix::random(ty, n, k, 0.05, input)).collect()
    };
    let gates = matrices(&mut input, types[0], width, hidden);
    let ups = matrices(&mut input, types[0], width, hidden);
    let downs = matrices(&mut input, types[1], hidden, width);
    let (ty_up, ty_down) = (types[0].id() as i32, types[1].id() as i32);
    let together = |list: &[Matrix], partners: Option<&[Matrix]>| {
        let all = |list: &[Matrix]| list.iter().flat_map(|m| m.bytes.iter().copied()).collect::<Vec<u8>>();
        let (first, k) = (&list[0], list[0].k);
        let pair = 1 + usize::from(partners.is_some());
        let one = gpu.kernels.repack_bytes(first.ty.id() as i32, first.rows * pair, k);
        let (source, partner) = (gpu.put(&all(list)), partners.map(|p| gpu.put(&all(p))));
        let packed = gpu.poisoned::<u8>(one * experts);
        for e in 0..experts {
            let at = |memory: &super::Memory<u8>, i: usize| memory.out().cast::<u8>().wrapping_add(i).cast();
            let from = e * first.bytes.len();
            let up = partner.as_ref().map(|p| at(p, from));
            gpu.ran(gpu.kernels.repack(
                first.ty.id() as i32,
                at(&source, from),
                up,
                first.rows,
                k,
                at(&packed, e * one),
            ));
        }
        packed
    };
    let (w_up, w_down) = (together(&gates, Some(&ups)), together(&downs, None));

    let ids = choices(&mut input, rows, used, experts);
    let weights: Vec<f32> = ids.iter().map(|_| 0.05 + input.unit()).collect();
    let x = input.halves(rows * hidden, 1.0);
    let (ids_at, weights_at, x_at) = (gpu.put(&ids), gpu.put(&weights), gpu.put(&x));
    let plan = gpu.poisoned::<i32>(gpu.kernels.plan_bytes(ids.len(), experts) / 4);
    let act = gpu.poisoned::<f16>(ids.len() * width);
    let [r, u, e, h, f] = shape.map(|n| n as i32);
    let what = format!("{} and {}, {shape:?}, overlap {overlap}, tile {tile}", types[0], types[1]);
    for part_type in [0, F16] {
        let part = Floats::poisoned(gpu, part_type, ids.len() * hidden);
        let (p, a, ldx) = (plan.out(), act.out(), hidden as i64);
        // One after the other without a wait, as a pass does it.
        let codes = [
            launch!(gpu, dllm_moe_route(ids_at.input(), ids.len() as i32, e, p)),
            launch!(gpu, dllm_moe_gate_up(ty_up, w_up.input(), x_at.input(), ldx, p, r, u, e, h, f, a, overlap, tile)),
            launch!(
                gpu,
                dllm_moe_down(
                    ty_down,
                    w_down.input(),
                    act.input(),
                    p,
                    weights_at.input(),
                    r,
                    u,
                    e,
                    f,
                    h,
                    part.out(),
                    part_type,
                    overlap,
                    tile,
                    h,
                    tile
                )
            ),
        ];
        codes.into_iter().for_each(|code| gpu.ran(code));

        // Entries of skipped ids are not written: they hold the poison, which the twin's zeros stand for.
        let (mut got_act, mut got) = (single(&gpu.get(&act)), part.get(gpu));
        for (i, _) in ids.iter().enumerate().filter(|(_, id)| !(0..e).contains(*id)) {
            for skipped in [&mut got_act[i * width..][..width], &mut got[i * hidden..][..hidden]] {
                assert!(skipped.iter().all(|v| v.is_nan()), "{what}: a skipped entry was written");
                skipped.fill(0.0);
            }
        }
        let values = |list: &[Matrix]| -> Experts { list.iter().map(Matrix::values).collect() };
        let want_act = gate_up(&single(&x), &ids, used, &values(&gates), &values(&ups), hidden);
        close(&format!("{what}: activations"), &got_act, &want_act, 1.1e-3);
        let want = down(&got_act, &ids, &weights, &values(&downs), width);
        close(&format!("{what}: output {part_type}"), &got, &want, 8e-4);
    }
}

fn ty(id: u32) -> GgmlType {
    GgmlType::from_id(id).unwrap_or_else(|| panic!("ggml has no type {id}"))
}

#[test]
fn expert_products_are_their_twin_in_every_type() {
    let Some(gpu) = gpu() else { return };
    for ty in block_types() {
        products(&gpu, [ty, ty], [40, 2, 4, 512, 256], 0, 0);
    }
}

#[test]
fn expert_products_are_their_twin_at_every_number_of_rows() {
    let Some(gpu) = gpu() else { return };
    for rows in [1, 5, 16, 77, 256, 300] {
        for overlap in [0, 1] {
            products(&gpu, [ty(12), ty(6)], [rows, 3, 8, 256, 192], overlap, 0);
        }
    }
}

#[test]
fn expert_products_are_their_twin_in_every_tile() {
    let Some(gpu) = gpu() else { return };
    for tile in [1, 2, 3] {
        for overlap in [0, 1] {
            products(&gpu, [ty(12), ty(8)], [77, 2, 8, 256, 192], overlap, tile);
        }
    }
}

/// 8 of 128 experts, and the model's widths; few rows and not both at once, since the twin is slow.
#[test]
fn expert_products_are_their_twin_at_the_models_sizes() {
    let Some(gpu) = gpu() else { return };
    products(&gpu, [ty(8), ty(8)], [5, 8, 128, 256, 192], 1, 0);
    products(&gpu, [ty(1), ty(6)], [3, 8, 8, 2816, 704], 0, 0);
}
