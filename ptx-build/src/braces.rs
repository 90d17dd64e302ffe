//! Where a function of PTX text ends.

/// Counts the braces of a function, line by line. Inline assembly has some of its own, also in column 0; none stands in a
/// comment or a string.
#[derive(Debug, Default)]
pub struct Braces(usize);

impl Braces {
    /// Whether the function's last brace closes in `line`, the one after those that were given before.
    pub fn close_in(&mut self, line: &str) -> bool {
        let (opened, closed) = (line.matches('{').count(), line.matches('}').count());
        self.0 = (self.0 + opened).saturating_sub(closed);
        closed > 0 && self.0 == 0
    }
}
