//! The `ringseal` command. Everything is in [`cli`].

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
