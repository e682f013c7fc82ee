//! What rustc has to link, and what dependents may ask (`DEP_DLLM_LLAMA_*`).

use crate::compile::Built;
use crate::source::Tree;
use crate::vars::Vars;

pub fn emit(vars: &Vars, tree: &Tree, built: &Built) {
    for dir in &built.lib_dirs {
        println!("cargo::rustc-link-search=native={}", dir.display());
        // Dependents that ship programs need the folder, to put the libraries beside them.
        println!("cargo::metadata=lib_dir={}", dir.display());
    }
    println!("cargo::metadata=dynamic={}", u8::from(vars.dynamic));
    println!("cargo::metadata=patched={}", u8::from(tree.patched));
    if vars.cuda {
        println!("cargo::metadata=cuda_architectures={}", vars.cuda_architectures);
        println!("cargo::metadata=nvcc={}", Vars::nvcc());
    }
    let kind = if vars.dynamic { "dylib" } else { "static" };
    println!("cargo::rustc-link-lib={kind}=llama");
    println!("cargo::rustc-link-lib={kind}=ggml");
    if !vars.dynamic {
        static_backends(vars);
    }
    println!("cargo::rustc-link-lib={kind}=ggml-base");
    system(vars);
}

fn static_backends(vars: &Vars) {
    println!("cargo::rustc-link-lib=static=ggml-cpu");
    if vars.cuda {
        println!("cargo::rustc-link-lib=static=ggml-cuda");
        for dir in Vars::cuda_lib_dirs() {
            println!("cargo::rustc-link-search=native={}", dir.display());
        }
        for lib in ["cudart", "cublas", "cublasLt", "cuda"] {
            println!("cargo::rustc-link-lib=dylib={lib}");
        }
    }
    if vars.vulkan {
        println!("cargo::rustc-link-lib=static=ggml-vulkan");
        if let (true, Some(sdk)) = (vars.target_os == "windows", Vars::vulkan_sdk()) {
            println!("cargo::rustc-link-search=native={}", sdk.join("Lib").display());
        }
        let name = if vars.target_os == "windows" { "vulkan-1" } else { "vulkan" };
        println!("cargo::rustc-link-lib=dylib={name}");
    }
    if vars.metal {
        println!("cargo::rustc-link-lib=static=ggml-metal");
        for framework in ["Foundation", "Metal", "MetalKit"] {
            println!("cargo::rustc-link-lib=framework={framework}");
        }
    }
}

fn system(vars: &Vars) {
    match (vars.target_os.as_str(), vars.target_env.as_str()) {
        ("macos", _) => {
            println!("cargo::rustc-link-lib=dylib=c++");
            println!("cargo::rustc-link-lib=framework=Accelerate");
        }
        ("windows", "msvc") => println!("cargo::rustc-link-lib=dylib=advapi32"),
        _ => {
            println!("cargo::rustc-link-lib=dylib=stdc++");
            println!("cargo::rustc-link-lib=dylib=m");
            println!("cargo::rustc-link-lib=dylib=pthread");
        }
    }
}
