fn main() {
    let dir = std::env::args().nth(1).unwrap();
    let level = std::env::args().nth(2).unwrap_or("reference".into());
    let mut p = dllm_engine::parity::ParityParams::default();
    p.level = if level == "reference" { dllm_engine::params::Level::Reference } else { dllm_engine::params::Level::Fused };
    p.file = std::env::args().nth(3);
    match dllm_engine::parity::run(dir.as_ref(), &p, &mut |c| println!("{c}")) {
        Ok(c) => println!("{} checks, {} missed", c.len(), c.iter().filter(|c| !c.passed()).count()),
        Err(e) => println!("{e}"),
    }
}
