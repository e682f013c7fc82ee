//! quant_mm.cu, repack.cu and dense.cu. Activations are halves in kernel and twin; products are exact and sums F32.

use half::f16;

use super::super::gpu::{Gpu, Memory, NONE, launch};
use super::super::input::{Input, Matrix, block_types, single};
use super::super::products::{clamp_half, geglu, matmul, to_half};
use super::super::wide;
use super::{F16, F32, Floats, ROUNDED, close, gpu};
use crate::ggml::GgmlType;

/// Scale of a block and its product with a code are rounded to F16 each (2.8e-4 of the norm each); measured on an H200: 2.1e-4
/// to 3.7e-4 into F32, 4.2e-4 into F16.
const BLOCKS: f64 = 7e-4;
/// The same through gelu(gate) * up, where two such errors meet; measured: 3.6e-4 to 5.8e-4.
const GATED: f64 = 1.1e-3;
/// Output columns that no tile divides, and an inner dimension of two K blocks.
const N: usize = 208;
const K: usize = 512;
const ROWS: [usize; 5] = [1, 5, 16, 256, 300];
const MM_GELU: i32 = 2;

/// `dllm_qmm` on halves of `rows` rows.
fn qmm(gpu: &Gpu, ty: GgmlType, w: &Memory<u8>, x: &[f16], shape: [usize; 3], epilogue: i32, alpha: f32) -> Vec<f32> {
    let [rows, k, n] = shape;
    let x = gpu.put(x);
    let columns = if epilogue == MM_GELU { n / 2 } else { n };
    let out = Floats::poisoned(gpu, i32::from(epilogue != F32), rows * columns);
    let code = launch!(
        gpu,
        dllm_qmm(
            ty.id() as i32,
            w.input(),
            x.input(),
            k as i64,
            rows as i32,
            k as i32,
            n as i32,
            out.out(),
            columns as i64,
            epilogue,
            alpha,
            1,
            std::ptr::null_mut(),
            0
        )
    );
    gpu.ran(code);
    out.get(gpu)
}

#[test]
fn quantized_products_are_their_twin_in_every_type() {
    let Some(gpu) = gpu() else { return };
    for ty in block_types() {
        let mut input = Input::new(u64::from(ty.id()));
        let matrix = Matrix::random(ty, N, K, 0.02, &mut input);
        let (w, values) = (gpu.repacked(&matrix, None, 1), matrix.values());
        for rows in ROWS {
            let x = input.halves(rows * K, 1.0);
            let want = matmul(&values, &single(&x), K);
            for (epilogue, alpha) in [(F32, 1.0), (F16, 0.5)] {
                let got = qmm(&gpu, ty, &w, &x, [rows, K, N], epilogue, alpha);
                let want: Vec<f64> = want.iter().map(|v| v * f64::from(alpha)).collect();
                close(&format!("{ty}, {rows} rows, output {epilogue}"), &got, &want, BLOCKS);
            }
        }
    }
}

#[test]
fn gated_quantized_products_are_their_twin_in_every_type() {
    let Some(gpu) = gpu() else { return };
    for ty in block_types() {
        let mut input = Input::new(100 + u64::from(ty.id()));
        let [gate, up] = std::array::from_fn(|_| Matrix::random(ty, N / 2, K, 0.05, &mut input));
        let w = gpu.repacked(&gate, Some(&up), 1);
        for rows in ROWS {
            let x = input.halves(rows * K, 1.0);
            let got = qmm(&gpu, ty, &w, &x, [rows, K, N], MM_GELU, 0.0625);
            let both = matmul(&[gate.values(), up.values()].concat(), &single(&x), K);
            let want: Vec<f64> = geglu(&both, N / 2).iter().map(|v| v / 16.0).collect();
            close(&format!("{ty}, {rows} rows, gated"), &got, &want, GATED);
        }
    }
}

/// Row by row and value by value: unit vectors as activations read the repacked matrix back.
#[test]
fn repacking_loses_nothing_but_rounding() {
    let Some(gpu) = gpu() else { return };
    let unit: Vec<f16> = (0..K * K).map(|i| f16::from_f32(if i / K == i % K { 1.0 } else { 0.0 })).collect();
    for ty in block_types() {
        let mut input = Input::new(200 + u64::from(ty.id()));
        // 37 rows: two whole tiles and a part of one.
        let matrix = Matrix::random(ty, 37, K, 0.02, &mut input);
        let w = gpu.repacked(&matrix, None, 1);
        let got = qmm(&gpu, ty, &w, &unit, [K, K, 37], F32, 1.0);
        let values = matrix.values();
        let want: Vec<f64> = (0..K).flat_map(|c| values.iter().skip(c).step_by(K).map(|v| f64::from(*v))).collect();
        close(&format!("{ty} read back"), &got, &want, BLOCKS);
    }
}

/// Slices and stacked matrices: tiles of 16 rows from `tile0` on.
#[test]
fn slices_of_a_matrix_are_repacked_to_their_tiles() {
    let Some(gpu) = gpu() else { return };
    for id in [12, 8, 1] {
        let Some(ty) = GgmlType::from_id(id) else { panic!("type {id}") };
        let mut input = Input::new(300);
        let parts = [48, 144, 16].map(|rows| Matrix::random(ty, rows, K, 0.02, &mut input));
        let w = gpu.poisoned::<u8>(gpu.kernels.repack_bytes(id as i32, N, K));
        let mut tile = 0;
        for part in &parts {
            let source = gpu.put(&part.bytes);
            let (rows, k) = (part.rows as i64, K as i64);
            gpu.ran(launch!(gpu, dllm_repack(id as i32, source.input(), NONE, rows, k, w.out(), tile)));
            tile += rows / 16;
        }
        let x = input.halves(5 * K, 1.0);
        let values = parts.each_ref().map(Matrix::values).concat();
        let got = qmm(&gpu, ty, &w, &x, [5, K, N], F32, 1.0);
        close(&format!("{ty} in slices"), &got, &matmul(&values, &single(&x), K), BLOCKS);
    }
}

#[test]
fn blocks_are_expanded_to_halves_in_every_type() {
    let Some(gpu) = gpu() else { return };
    for ty in block_types() {
        for (rows, k) in [(1, 256), (5, 512), (300, 768)] {
            let matrix = Matrix::random(ty, rows, k, 0.02, &mut Input::new(400 + u64::from(ty.id())));
            let (source, out) = (gpu.put(&matrix.bytes), gpu.poisoned::<f16>(rows * k));
            let (rows_, k_) = (rows as i64, k as i64);
            gpu.ran(launch!(gpu, dllm_dequant_f16(ty.id() as i32, source.input(), rows_, k_, out.out())));
            close(&format!("{ty}, {rows} x {k}"), &single(&gpu.get(&out)), &wide(&matrix.values()), ROUNDED);
        }
    }
}

/// Weights and activations are halves, so that only sums are rounded, and an F16 output. The tensor cores cut off when they
/// add: 32 times here, up to 2^-23 of the sum each.
#[test]
fn dense_products_are_their_twin() {
    let Some(gpu) = gpu() else { return };
    let scratch = gpu.poisoned::<u8>(32 << 20);
    for (i, rows) in ROWS.into_iter().enumerate() {
        for (k, n) in [(K, N), (72, 37)] {
            let mut input = Input::new(500 + i as u64);
            let (w, x) = (input.halves(n * k, 0.05), input.halves(rows * k, 1.0));
            let (w_at, x_at) = (gpu.put(&w), gpu.put(&x));
            let want = matmul(&single(&w), &single(&x), k);
            for ty in [F32, F16] {
                let out = Floats::poisoned(&gpu, ty, rows * n);
                let (r, k_, n_) = (rows as i32, k as i32, n as i32);
                let code = launch!(gpu, dllm_gemm(w_at.input(), x_at.input(), r, k_, n_, out.out(), ty, scratch.out()));
                gpu.ran(code);
                let limit = if ty == F16 { ROUNDED } else { 5e-6 };
                close(&format!("gemm {rows} x {k} x {n} to {ty}"), &out.get(&gpu), &want, limit);
            }
        }
    }
}

/// An exponential with an error of 2 in the last place and one rounding to F16; large products are clamped.
#[test]
fn geglu_is_its_twin() {
    let Some(gpu) = gpu() else { return };
    for (rows, n) in [(1, 4), (5, 36), (16, 2112), (256, 2112), (300, 128)] {
        let mut x = Input::new(600).values(rows * 2 * n, 2.0);
        // Both ends of the activation, and products beyond the range.
        (x[0], x[n], x[1], x[n + 1], x[2], x[n + 2]) = (300.0, 300.0, -300.0, 300.0, 100.0, -1e4);
        let (x_at, out) = (gpu.put(&x), gpu.poisoned::<f16>(rows * n));
        gpu.ran(launch!(gpu, dllm_geglu(x_at.input(), rows as i32, n as i32, out.out())));
        let mut got = single(&gpu.get(&out));
        let mut want: Vec<f64> = geglu(&wide(&x), n).into_iter().map(clamp_half).collect();
        assert_eq!(got[..3], [65_504.0, 0.0, -65_504.0], "{rows} x {n}");
        (0..3).for_each(|i| (got[i], want[i]) = (0.0, 0.0)); // they would hide the others' errors
        close(&format!("geglu {rows} x {n}"), &got, &want, ROUNDED);
    }
}

#[test]
fn to_half_rounds_to_the_nearest_and_clamps() {
    let Some(gpu) = gpu() else { return };
    for count in [4, 20, 300 * 4096] {
        let mut x = Input::new(700).values(count, 100.0);
        x[..4].copy_from_slice(&[1e9, -1e9, 65_519.0, 3e-8]);
        let (x_at, out) = (gpu.put(&x), gpu.poisoned::<f16>(count));
        gpu.ran(launch!(gpu, dllm_to_half(x_at.input(), count as i64, out.out())));
        let want: Vec<f16> = x.iter().map(|v| to_half(*v)).collect();
        assert!(gpu.get(&out) == want, "{count} values");
    }
}

/// The twin of the rounding, where no device is needed.
#[test]
fn the_twin_clamps_to_the_range_of_halves() {
    assert_eq!([1e9, -1e9, 1.0].map(|x| to_half(x).to_f32()), [65_504.0, -65_504.0, 1.0]);
    assert_eq!([1e9, -1e9, 0.1].map(clamp_half), [65_504.0, -65_504.0, 0.1]);
}
