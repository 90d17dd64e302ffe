//! The energy that GPUs have taken, by NVML, which is found at run time.

use std::ffi::c_char;

use cudarc::driver::sys;
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use ringseal::cuda::Device;

/// Counters of some GPUs.
pub(crate) struct Energy {
    nvml: Nvml,
    /// Addresses on the PCI bus; the driver and NVML number GPUs differently.
    gpus: Vec<String>,
}

impl Energy {
    /// Each of `devices` counts once.
    ///
    /// # Errors
    /// What to say where energy cannot be read.
    pub(crate) fn new(devices: &[Device]) -> Result<Self, String> {
        let nvml = Nvml::init().map_err(|error| error.to_string())?;
        let mut gpus: Vec<String> = devices.iter().map(bus_address).collect::<Result<_, _>>()?;
        gpus.sort();
        gpus.dedup();
        let energy = Self { nvml, gpus };
        energy.joules().map_err(|error| error.to_string())?;
        Ok(energy)
    }

    /// Joules since the driver was loaded.
    pub(crate) fn joules(&self) -> Result<f64, NvmlError> {
        let gpu = |address: &String| {
            let millijoules = self.nvml.device_by_pci_bus_id(address.as_str())?.total_energy_consumption()?;
            Ok(millijoules as f64 / 1e3)
        };
        self.gpus.iter().map(gpu).sum()
    }
}

fn bus_address(device: &Device) -> Result<String, String> {
    let mut text: [c_char; 32] = [0; 32];
    // SAFETY: the device is open, so the driver has started and has a handle for this number, which is the handle's value;
    // the text is valid for writes of its length.
    let result = unsafe {
        let mut handle = 0;
        match sys::cuDeviceGet(&mut handle, device.ordinal() as i32) {
            sys::CUresult::CUDA_SUCCESS => sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), 32, handle),
            other => other,
        }
    };
    if result != sys::CUresult::CUDA_SUCCESS {
        return Err(format!("cuDeviceGetPCIBusId: {result:?}"));
    }
    Ok(text.iter().take_while(|byte| **byte != 0).map(|byte| *byte as u8 as char).collect())
}
