//! A build that cannot start says so in one sentence: the program that is missing, and the command that installs it.

#[path = "../build/tools.rs"]
mod tools;

use tools::{Tool, Wanted, obstacle};

const SYSTEMS: [&str; 3] = ["linux", "windows", "macos"];

fn wanted(os: &str) -> Wanted<'_> {
    Wanted { os, cuda: true, vulkan: true, metal: false }
}

#[test]
fn a_missing_tool_is_named_with_its_install_command() {
    let cases = [
        (Tool::Cmake, "CMake", "CMAKE"),
        (Tool::Cxx, "C++ compiler", "CXX"),
        (Tool::Nvcc, "feature `cuda` needs nvcc", "CUDACXX"),
        (Tool::Glslc, "feature `vulkan` needs glslc", "PATH"),
    ];
    for os in SYSTEMS {
        for (missing, name, variable) in cases {
            let sentence = obstacle(&wanted(os), |tool| tool != missing).unwrap();
            assert!(sentence.contains(name) && sentence.contains(variable), "{os}: {sentence}");
            let command = sentence.split('`').rev().nth(1).unwrap();
            let installer = match os {
                "windows" => ["winget install "; 2],
                "macos" => ["brew install ", "xcode-select --install"],
                _ => ["apt-get install "; 2],
            };
            // There is no CUDA on macOS; what is said there does not matter.
            let known = installer.iter().any(|start| command.starts_with(start));
            assert!(known || (os, missing) == ("macos", Tool::Nvcc), "{os}: {sentence}");
            assert!(!sentence.contains('\n') && !sentence.contains("  "), "{sentence}");
        }
    }
}

#[test]
fn tools_of_features_that_are_off_are_not_asked_for() {
    let plain = Wanted { cuda: false, vulkan: false, ..wanted("linux") };
    assert_eq!(obstacle(&plain, |tool| matches!(tool, Tool::Cmake | Tool::Cxx)), None);
    assert_eq!(obstacle(&wanted("linux"), |_| true), None);
}

#[test]
fn metal_is_for_macos() {
    let metal = |os| obstacle(&Wanted { metal: true, ..wanted(os) }, |_| true);
    assert_eq!(metal("macos"), None);
    assert!(metal("linux").unwrap().contains("macOS only"));
}
