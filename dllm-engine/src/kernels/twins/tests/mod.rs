//! Kernels against their twins, and the twins against ggml's stock operations.
//!
//! Limits: a result in half precision is off by at most 2^-11 (4.9e-4) of itself, 2.8e-4 of the norm of many. F32 sums of some
//! thousand terms are off by 1e-6 at most. What else adds to a limit stands at the test.

mod attention;
mod experts;
mod norms;
mod products;
mod refusals;
mod stock;
mod tokens;

use half::f16;

use super::gpu::{Gpu, Memory};
use super::input::single;

/// Of F16 and F32, as the kernels number them.
pub(super) const F32: i32 = 0;
pub(super) const F16: i32 = 1;
pub(super) const EPS: f32 = 1e-6;
/// Relative error of results that were rounded to F16 once.
pub(super) const ROUNDED: f64 = 4e-4;
/// Relative error of F32 sums.
pub(super) const EXACT: f64 = 2e-6;

/// The device, or `None` and a line that says so. With `DLLM_TEST_GPU=1` it must be there.
pub(super) fn gpu() -> Option<Gpu> {
    match Gpu::open() {
        Ok(gpu) => Some(gpu),
        Err(why) => {
            let wanted = std::env::var("DLLM_TEST_GPU").is_ok_and(|value| value == "1");
            assert!(!wanted, "DLLM_TEST_GPU is 1, but {why}");
            println!("no CUDA device: not run");
            None
        }
    }
}

/// The norm of the errors is at most `limit` of the norm of the values, and no error is beyond ten times that of its value and
/// of the typical size.
pub(super) fn close(what: &str, got: &[f32], want: &[f64], limit: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let size = square(&mut want.iter().copied()).sqrt();
    let typical = size / (want.len() as f64).sqrt();
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        // Not `>`: a NaN must fail.
        assert!(error <= 10.0 * limit * (want.abs() + typical), "{what}: value {i} is {got}, not {want}");
    }
    let error = square(&mut got.iter().zip(want).map(|(got, want)| f64::from(*got) - want)).sqrt();
    assert!(error <= limit * size, "{what}: off by {:.2e} of the norm, {limit:.0e} allowed", error / size);
}

/// An output of F32 or F16, poisoned.
pub(super) enum Floats {
    Single(Memory<f32>),
    Half(Memory<f16>),
}

impl Floats {
    pub fn poisoned(gpu: &Gpu, ty: i32, n: usize) -> Self {
        if ty == F16 { Self::Half(gpu.poisoned(n)) } else { Self::Single(gpu.poisoned(n)) }
    }

    /// An input of that type, and its values as they arrive.
    pub fn put(gpu: &Gpu, ty: i32, values: &[f32]) -> (Self, Vec<f32>) {
        if ty == F16 {
            let halves: Vec<f16> = values.iter().map(|v| f16::from_f32(*v)).collect();
            (Self::Half(gpu.put(&halves)), single(&halves))
        } else {
            (Self::Single(gpu.put(values)), values.to_vec())
        }
    }

    pub fn out(&self) -> *mut std::ffi::c_void {
        match self {
            Self::Single(m) => m.out(),
            Self::Half(m) => m.out(),
        }
    }

    pub fn input(&self) -> *const std::ffi::c_void {
        self.out().cast_const()
    }

    pub fn get(&self, gpu: &Gpu) -> Vec<f32> {
        match self {
            Self::Single(m) => gpu.get(m),
            Self::Half(m) => single(&gpu.get(m)),
        }
    }
}

/// The limit of an output of F32 or F16.
pub(super) fn limit(ty: i32) -> f64 {
    if ty == F16 { ROUNDED } else { EXACT }
}

mod itself {
    use super::close;

    fn fails(got: &[f32], want: &[f64]) -> bool {
        std::panic::catch_unwind(|| close("values", got, want, 1e-3)).is_err()
    }

    /// A check that cannot fail would hold nothing.
    #[test]
    fn close_finds_what_is_off() {
        let want: Vec<f64> = (1..=10_000).map(|i| f64::from(i % 7) - 3.0).collect();
        let with = |change: fn(f32) -> f32, every: usize| -> Vec<f32> {
            want.iter().enumerate().map(|(i, v)| if i % every == 0 { change(*v as f32) } else { *v as f32 }).collect()
        };
        assert!(!fails(&with(|v| v, 1), &want));
        assert!(!fails(&with(|v| v * 1.0005, 1), &want));
        assert!(fails(&with(|v| v * 1.002, 1), &want), "all a little off");
        assert!(fails(&with(|v| v + 0.1, 10_000), &want), "one of ten thousand off");
        assert!(fails(&with(|_| f32::NAN, 10_000), &want), "no number");
        assert!(fails(&with(|_| f32::INFINITY, 10_000), &want), "infinite");
    }
}
