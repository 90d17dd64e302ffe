//! How a bench on a GPU ends.

use ringseal::{Error, Result};

/// Says why there is nothing to measure, or ends the process with an error.
pub(crate) fn report(outcome: Result<()>) {
    match outcome {
        Ok(()) => {}
        Err(Error::NoDevice(why)) => eprintln!("skipped: {why}"),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}
