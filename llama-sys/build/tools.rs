//! The programs that the build calls: whether they are there, and which compilers they are.

/// A program that may be missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    Cmake,
    Cxx,
    Nvcc,
    Glslc,
}

/// What is to be built, as far as it decides which programs are needed.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// The operating system, as Cargo names it.
    pub os: &'a str,
    pub cuda: bool,
    pub vulkan: bool,
    pub metal: bool,
}

/// One sentence for the first thing that keeps the build from starting: what is missing, and how to get it.
pub fn obstacle(wanted: &Wanted, there: impl Fn(Tool) -> bool) -> Option<String> {
    if wanted.metal && wanted.os != "macos" {
        return Some("feature `metal` builds on macOS only: leave it out here".into());
    }
    let needed = [(Tool::Cmake, true), (Tool::Cxx, true), (Tool::Nvcc, wanted.cuda), (Tool::Glslc, wanted.vulkan)];
    let missing = needed.into_iter().find(|(tool, needed)| *needed && !there(*tool)).map(|(tool, _)| tool)?;
    let install = install(missing, wanted.os);
    Some(match missing {
        Tool::Cmake => format!("CMake was not found: install it with `{install}`, or name it in CMAKE"),
        Tool::Cxx => format!("no C++ compiler was found: install one with `{install}`, or name it in CXX"),
        Tool::Nvcc => format!(
            "feature `cuda` needs nvcc, which was not found: install the CUDA toolkit 12.8 or newer with `{install}`, or \
             name nvcc in CUDACXX"
        ),
        Tool::Glslc => format!(
            "feature `vulkan` needs glslc, which was not found: install it with `{install}`, or put the Vulkan SDK's into \
             PATH"
        ),
    })
}

fn install(tool: Tool, os: &str) -> &'static str {
    match (tool, os) {
        (Tool::Cmake, "windows") => "winget install Kitware.CMake",
        (Tool::Cmake, "macos") => "brew install cmake",
        (Tool::Cmake, _) => "apt-get install cmake",
        (Tool::Cxx, "windows") => "winget install Microsoft.VisualStudio.2022.BuildTools",
        (Tool::Cxx, "macos") => "xcode-select --install",
        (Tool::Cxx, _) => "apt-get install g++",
        (Tool::Nvcc, "windows") => "winget install Nvidia.CUDA",
        (Tool::Nvcc, _) => "apt-get install cuda-toolkit-12-8", // from NVIDIA's own repository; docs/build.md
        (Tool::Glslc, "windows") => "winget install KhronosGroup.VulkanSDK",
        (Tool::Glslc, "macos") => "brew install shaderc vulkan-loader vulkan-headers",
        (Tool::Glslc, _) => "apt-get install glslc libvulkan-dev spirv-headers",
    }
}
