//! Asks the system for the programs that the build needs, and the compilers for their versions.

use std::process::{Command, Stdio};

use crate::Result;
use crate::tools::{Tool, Wanted, obstacle};
use crate::vars::Vars;

/// Refuses a build that lacks a program. Returns the compilers with their versions: the libraries depend on them.
pub fn check(vars: &Vars) -> Result<String> {
    let compiler = |cpp: bool| cc::Build::new().cpp(cpp).try_get_compiler().ok();
    let wanted = Wanted { os: &vars.target_os, cuda: vars.cuda, vulkan: vars.vulkan, metal: vars.metal };
    let there = |tool: Tool| match tool {
        Tool::Cmake => version(&Vars::cmake()).is_some(),
        // Microsoft's compiler knows no --version; that it was found is enough.
        Tool::Cxx => compiler(true).is_some_and(|c| c.is_like_msvc() || version(&path(&c)).is_some()),
        Tool::Nvcc => version(&Vars::nvcc()).is_some(),
        Tool::Glslc => version("glslc").is_some(),
    };
    if let Some(sentence) = obstacle(&wanted, there) {
        return Err(sentence);
    }
    // Microsoft's compiler has its version in its path.
    let identity = |c: cc::Tool| version(&path(&c)).unwrap_or_else(|| path(&c));
    let mut list: Vec<String> = [compiler(false), compiler(true)].into_iter().flatten().map(identity).collect();
    if vars.cuda {
        list.extend(version(&Vars::nvcc()));
    }
    Ok(list.join("\n"))
}

fn path(compiler: &cc::Tool) -> String {
    compiler.path().display().to_string()
}

/// What a program says to `--version`; `None` where it does not answer.
fn version(program: &str) -> Option<String> {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}
