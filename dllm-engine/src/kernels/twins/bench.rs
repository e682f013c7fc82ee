//! Times of the kernels, one by one, at the sizes of one denoising step of DiffusionGemma 26B-A4B.

use std::time::Instant;

use super::bench_parts;
use super::gpu::Gpu;
use crate::error::Result;

/// Positions of a canvas.
const CANVAS: usize = 256;
/// Launches in a row with one wait behind them, and how often.
const LAUNCHES: usize = 50;
const ROUNDS: usize = 9;

/// One kernel at one shape.
#[derive(Debug, Clone)]
pub struct Line {
    /// The C function without its prefix.
    pub kernel: &'static str,
    /// Its sizes.
    pub shape: String,
    /// Microseconds of one launch.
    pub micros: f64,
    /// Bytes that it must read and write at least, weights first of all.
    pub bytes: f64,
    /// Multiplications and additions; 0 where they are not what it does.
    pub operations: f64,
}

impl Line {
    /// Gigabytes per second.
    pub fn gigabytes(&self) -> f64 {
        self.bytes / self.micros / 1e3
    }

    /// 10^12 operations per second.
    pub fn teraflops(&self) -> f64 {
        self.operations / self.micros / 1e6
    }
}

/// Times all kernels with so many lanes of one canvas each and reports line by line. The device's name comes back.
///
/// # Errors
/// `Backend` where there is no CUDA device or no kernel library, or a kernel failed.
pub fn run(lanes: usize, report: &mut dyn FnMut(&Line)) -> Result<String> {
    let gpu = Gpu::open()?;
    let mut timer = Timer { gpu: &gpu, lanes, rows: CANVAS * lanes, report };
    bench_parts::norms(&mut timer)?;
    bench_parts::attention(&mut timer)?;
    bench_parts::dense(&mut timer)?;
    bench_parts::experts(&mut timer)?;
    bench_parts::tokens(&mut timer)?;
    Ok(gpu.name())
}

/// What the parts share.
pub(super) struct Timer<'t> {
    pub gpu: &'t Gpu,
    pub lanes: usize,
    pub rows: usize,
    report: &'t mut dyn FnMut(&Line),
}

impl Timer<'_> {
    /// Rows, as the kernels want them.
    pub fn rows_i32(&self) -> i32 {
        self.rows as i32
    }

    /// Times launch after launch; the number of a launch lets it take another copy of its weights each time. The median of
    /// some rounds, each the mean of its launches.
    pub fn time(
        &mut self,
        kernel: &'static str,
        shape: String,
        bytes: usize,
        operations: f64,
        launch: impl Fn(usize) -> i32,
    ) -> Result<()> {
        let mut times = Vec::with_capacity(ROUNDS);
        for round in 0..=ROUNDS {
            let since = Instant::now();
            for i in 0..LAUNCHES {
                self.gpu.kernels.check(launch(i), kernel)?;
            }
            self.gpu.wait()?;
            // The first round is for warming up.
            if round > 0 {
                times.push(since.elapsed().as_secs_f64() * 1e6 / LAUNCHES as f64);
            }
        }
        times.sort_by(f64::total_cmp);
        let line = Line { kernel, shape, micros: times[ROUNDS / 2], bytes: bytes as f64, operations };
        (self.report)(&line);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Line;

    #[test]
    fn rates_are_per_second() {
        let line = Line { kernel: "gemm", shape: String::new(), micros: 100.0, bytes: 4e8, operations: 5e10 };
        assert_eq!((line.gigabytes(), line.teraflops()), (4000.0, 500.0));
    }
}
