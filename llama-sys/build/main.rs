//! Builds the pinned llama.cpp (decision D1): find the source, copy and patch it, drive CMake, link, bind.

mod bindings;
mod compile;
mod compilers;
mod link;
mod patch;
mod source;
mod tools;
mod vars;

/// A build error is one sentence for the person who reads it: what is missing, and what to do.
type Result<T> = std::result::Result<T, String>;

fn main() {
    if let Err(message) = run() {
        // Cargo shows the panic-free form best: one line, no backtrace.
        println!("cargo::error={}", message.replace('\n', " "));
        std::process::exit(1);
    }
}

fn run() -> Result<()> {
    let vars = vars::Vars::read()?;
    let compilers = compilers::check(&vars)?;
    // Builds of several profiles may run at once and share the folder.
    let _lock = source::lock(&vars)?;
    let tree = source::prepare(&vars, &compilers)?;
    // Needs only headers: what is wrong with the bindings is said before minutes of compiling.
    bindings::generate(&vars, &tree)?;
    let built = compile::build(&vars, &tree)?;
    compile::abi_table(&tree)?;
    link::emit(&vars, &tree, &built);
    Ok(())
}
