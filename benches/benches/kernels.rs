//! The CUDA kernels one by one, at the sizes of one denoising step of DiffusionGemma 26B-A4B: one canvas, and eight lanes.
//! A table on standard output; without a CUDA device a line that says so.

use dllm_engine::kernels::twins::bench::{Line, run};

fn print(line: &Line) {
    let rate = |value: f64| if value > 0.0 { format!("{value:.0}") } else { "-".to_owned() };
    let flops = rate(line.teraflops());
    println!("{:17} {:58} {:9.1} {:>7} {:>7}", line.kernel, line.shape, line.micros, rate(line.gigabytes()), flops);
}

fn main() {
    for lanes in [1, 8] {
        println!("\n{lanes} lanes of 256 rows");
        println!("{:17} {:58} {:>9} {:>7} {:>7}", "kernel", "shape", "us", "GB/s", "TFLOPS");
        match run(lanes, &mut print) {
            Ok(device) => println!("on {device}"),
            Err(why) => {
                println!("no CUDA device: not run ({why})");
                return;
            }
        }
    }
}
