//! A check of the machine code around `wgmma`, whose hazard neither rustc nor ptxas reports: an instruction in flight still
//! reads its A operand from registers, and ptxas was seen to reuse them before the wait. The tags were wrong, silently.

use std::collections::BTreeSet;

/// The registers an unfinished `wgmma` reads (A), and those it writes (D).
struct InFlight {
    a: BTreeSet<u32>,
    d: BTreeSet<u32>,
    at: String,
}

/// Registers of the largest D that a 64 x N product has, 64 x N / 128 of them.
fn d_registers(opcode: &str) -> Option<u32> {
    let n = opcode.split('.').find_map(|part| part.strip_prefix("64x"))?.split('x').next()?;
    n.parse::<u32>().ok().map(|n| n / 2)
}

/// What is wrong in the output of `nvdisasm -c`, one line a finding: an instruction that writes an operand or touches the result
/// of a product in flight; a jump backwards or the end of the kernel while there is one; registers kept in local memory between
/// two products, where loops are.
pub(crate) fn findings(sass: &str) -> Vec<String> {
    let mut findings = Vec::new();
    let mut kernel = String::new();
    let mut labels = BTreeSet::new();
    let mut in_flight: Vec<InFlight> = Vec::new();
    // Accesses to local memory since the kernel's latest product.
    let mut local: Option<Vec<String>> = None;
    for line in sass.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix(".text.").and_then(|l| l.strip_suffix(':')) {
            kernel = name.to_owned();
            labels.clear();
            in_flight.clear();
            local = None;
        } else if let Some(label) = line.strip_suffix(':') {
            labels.insert(label.to_owned());
        }
        let Some(instruction) = Instruction::parse(line) else { continue };
        let opcode = instruction.opcode;
        let is_product = opcode.contains("GMMA.") && d_registers(opcode).is_some();
        if is_product {
            findings.extend(local.replace(Vec::new()).into_iter().flatten());
        } else if let Some(local) =
            local.as_mut().filter(|_| ["LDL", "STL"].iter().any(|l| opcode.starts_with(l)))
        {
            local.push(format!("{kernel}: {} ({opcode}) in the loop with the products", instruction.address));
        }
        if opcode.starts_with("WARPGROUP.DEPBAR") {
            in_flight.clear(); // the kernels wait for all groups at once
            continue;
        }
        let mut found = |what: &str, product: &InFlight| {
            findings
                .push(format!("{kernel}: {} {what} before the wait for {}", instruction.address, product.at));
        };
        if let Some(first) = in_flight.first() {
            let target =
                instruction.operands.iter().find_map(|o| Some(o.strip_prefix("`(")?.trim_end_matches(')')));
            if opcode.starts_with("BRA") && target.is_some_and(|t| labels.contains(t)) {
                found("jumps backwards", first);
            }
            if opcode == "EXIT" {
                found("ends", first);
            }
        }
        let written = if is_product { BTreeSet::new() } else { instruction.written() };
        for product in &in_flight {
            if let Some(register) = written.iter().find(|r| product.a.contains(r) || product.d.contains(r)) {
                found(&format!("({opcode}) writes R{register}"), product);
            } else if let Some(register) = instruction.named().find(|r| !is_product && product.d.contains(r))
            {
                found(&format!("({opcode}) reads R{register}"), product);
            }
        }
        if is_product {
            let range = |operand: Option<&&str>, count| -> BTreeSet<u32> {
                operand.and_then(|o| register(o)).map_or_else(BTreeSet::new, |r| (r..r + count).collect())
            };
            in_flight.push(InFlight {
                a: range(instruction.operands.get(1), 4),
                d: range(instruction.operands.first(), d_registers(opcode).unwrap_or_default()),
                at: format!("{} ({opcode})", instruction.address),
            });
        }
    }
    findings
}

struct Instruction<'a> {
    address: &'a str,
    opcode: &'a str,
    operands: Vec<&'a str>,
}

impl<'a> Instruction<'a> {
    /// `/*01f0*/  @P0 OPCODE operand, operand ;`
    fn parse(line: &'a str) -> Option<Self> {
        let (address, rest) = line.strip_prefix("/*")?.split_once("*/")?;
        let rest = rest.trim().trim_end_matches(';').trim();
        let rest = if rest.starts_with('@') { rest.split_once(' ')?.1.trim() } else { rest };
        let (opcode, operands) = rest.split_once(' ').unwrap_or((rest, ""));
        let operands = operands.split(',').map(str::trim).filter(|o| !o.is_empty()).collect();
        Some(Self { address, opcode, operands })
    }

    /// The general registers that its operands name.
    fn named(&self) -> impl Iterator<Item = u32> {
        let words = self.operands.iter().flat_map(|o| o.split(|c: char| !c.is_ascii_alphanumeric()));
        words.filter_map(register)
    }

    /// The registers that it writes.
    fn written(&self) -> BTreeSet<u32> {
        // Comparisons write predicates alone, and then name their sources.
        if self.opcode.contains("SETP") {
            return BTreeSet::new();
        }
        // Shuffles and atomics write a predicate and then a register.
        let is_predicate =
            |o: &str| o == "PT" || o.strip_prefix('P').is_some_and(|n| n.parse::<u32>().is_ok());
        let mut operands = self.operands.iter();
        let destination = match operands.next() {
            Some(o) if is_predicate(o) => operands.next(),
            first => first,
        };
        let Some(first) = destination.and_then(|o| register(o)) else { return BTreeSet::new() };
        let has = |suffix: &str| self.opcode.split('.').any(|part| part == suffix);
        let count = if has("128") {
            4
        } else if has("64") || has("WIDE") || (self.opcode.starts_with("CS2R") && !has("32")) {
            2
        } else {
            1
        };
        (first..first + count).collect()
    }
}

/// The number of a general register, with or without `.reuse` and the like.
fn register(operand: &str) -> Option<u32> {
    operand.strip_prefix('R')?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SASS: &str = "\
.text.seal:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0140*/                   LD.E.128 R88, desc[UR6][R2.64] ;
        /*01e0*/                   WARPGROUP.ARRIVE ;
        /*01f0*/                   BGMMA.64x128x256.AND.POPC R24, R92, gdesc[UR8], RZ, !UPT ;
        /*0200*/                   UMOV UR10, 0x80180 ;
        /*0210*/                   ISETP.NE.U32.AND P0, PT, R92, R93, PT ;
        /*0220*/                   BGMMA.64x128x256.AND.POPC R24, R88, gdesc[UR8], R24, gsb0 ;
        /*0228*/                   STS.128 [R93], R4 ;
        /*022c*/              @!P1 LDS R96, [R92] ;
        /*0230*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0240*/                   SHF.R.W.U32 R24, R92, 0x1, R24 ;
        /*0680*/               @P0 BRA `(.L_x_1) ;
        /*0690*/                   EXIT ;
";

    fn with(replaced: &str, by: &str) -> Vec<String> {
        assert!(SASS.contains(replaced));
        findings(&SASS.replacen(replaced, by, 1))
    }

    #[test]
    fn reading_and_waiting_are_fine() {
        assert_eq!(findings(SASS), [""; 0]);
    }

    #[test]
    fn local_memory_between_products() {
        assert_eq!(with("STS.128 [R93], R4", "LDL R4, [R1+0x8]"), [""; 0], "behind the last one");
        let found = with("UMOV UR10, 0x80180", "STL [R1+0x8], R4");
        assert_eq!(found, ["seal: 0200 (STL) in the loop with the products"]);
    }

    #[test]
    fn writes_to_operands_in_flight() {
        for (instruction, register) in [
            ("LDS R92, [R3]", "R92"),
            ("@P3 LDS.64 R94, [R3]", "R94"),
            ("LDS.128 R96, [R3]", ""),
            ("LDS.128 R88, [R3]", "R88"),
            ("IMAD.WIDE.U32 R22, R0, 0x10, R2", ""),
            ("IMAD.WIDE.U32 R94, R0, 0x10, R2", "R94"),
            ("SHFL.BFLY PT, R95, R4, 0x1, 0x1f", "R95"),
            ("CS2R R96, SRZ", ""),
            ("CS2R R90, SRZ", "R90"),
            ("PRMT R20, R92, 0x4140, R0", ""),
            ("MOV R24, RZ", "R24"),
            ("MOV R23, RZ", ""),
            ("MOV R87, RZ", "writes R87"),
            ("STS [R3+0x10], R25", "reads R25"),
            ("IADD3 R4, P1, -R87.reuse, 0x8, RZ", "reads R87"),
            ("IADD3 R4, P1, R88, 0x8, RZ", ""),
        ] {
            let found = with("STS.128 [R93], R4", instruction);
            if register.is_empty() {
                assert_eq!(found, [""; 0], "{instruction}");
            } else {
                assert!(!found.is_empty(), "{instruction}");
                assert!(found[0].starts_with("seal: 0228 (") && found[0].contains(register), "{found:?}");
            }
        }
    }

    #[test]
    fn back_edges_and_ends_in_flight() {
        let found = with("WARPGROUP.DEPBAR.LE gsb0, 0x0", "NOP");
        assert!(found.iter().any(|f| f.contains("0680 jumps backwards")), "{found:?}");
        assert!(found.iter().any(|f| f.contains("0690 ends")), "{found:?}");
        // Forwards is fine.
        assert_eq!(with("UMOV UR10, 0x80180", "@P0 BRA `(.L_x_9)"), [""; 0]);
    }

    #[test]
    fn kernels_are_apart() {
        let two = SASS.replace("        /*0230*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n", "");
        let found = findings(&format!("{two}.text.open:\n        /*0000*/  MOV R92, RZ ;\n"));
        assert!(found.iter().all(|f| f.starts_with("seal:")), "{found:?}");
    }
}
