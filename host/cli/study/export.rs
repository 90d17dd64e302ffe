//! A schedule as JSON, for simulators of collectives such as ASTRA-sim, or for conversion to Chakra traces.

use ringseal::collective::Algorithm;
use ringseal::collective::schedule::{Collective, Operand, Origin, Outgoing, Schedule};
use serde::Serialize;

use super::super::failure::{Failure, Outcome};

/// The whole file.
#[derive(Serialize)]
struct Document {
    format: &'static str,
    version: u32,
    collective: &'static str,
    algorithm: &'static str,
    ranks: usize,
    /// The vector is cut into so many chunks of equal length.
    chunks: usize,
    /// Each rank's operations, in the order in which it does them.
    programs: Vec<Vec<Operation>>,
}

/// What a rank does with one chunk. An operation needs those listed under `after`, which are the same rank's, by their
/// place in its list.
#[derive(Serialize)]
struct Operation {
    operation: &'static str,
    chunk: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<usize>,
    after: Vec<usize>,
}

/// An all-reduce's schedule. Receiving, opening, adding, storing, sealing and sending are operations of their own.
pub(super) fn schedule(algorithm: &str, ranks: &[usize]) -> Outcome<String> {
    let chosen = Algorithm::ALL.into_iter().find(|known| known.name() == algorithm).ok_or_else(|| {
        let known = Algorithm::ALL.map(Algorithm::name).join(", ");
        Failure::Input(format!("no algorithm {algorithm:?}; choose one of {known}"))
    })?;
    let &[ranks @ 1..=1024] = ranks else {
        return Err(Failure::Input(
            "an exported schedule is of one number of ranks, at most 1024, such as --ranks 4".into(),
        ));
    };
    let schedule = Schedule::new(Collective::AllReduce, chosen, ranks);
    let document = Document {
        format: "ringseal-schedule",
        version: 1,
        collective: "all-reduce",
        algorithm: chosen.name(),
        ranks,
        chunks: schedule.chunks,
        programs: schedule.programs.iter().map(|steps| steps.iter().fold(Vec::new(), extend)).collect(),
    };
    super::json(&document)
}

fn extend(mut list: Vec<Operation>, step: &ringseal::collective::schedule::Step) -> Vec<Operation> {
    let chunk = step.chunk;
    let mut add = |operation, peer, after: &[usize]| {
        list.push(Operation { operation, chunk, peer, after: after.to_vec() });
        list.len() - 1
    };
    let forwards = matches!(step.outgoing, Outgoing::Forward(_));
    let (mut value, mut opened): (Option<usize>, Vec<usize>) = (None, Vec::new());
    for (number, operand) in step.operands.iter().enumerate() {
        let here = match operand {
            Operand::Local => None,
            Operand::Received(Origin { from, .. }) => {
                let received = add("receive", Some(*from), &[]);
                let open = add("open", None, &[received]);
                opened.push(open);
                Some(open)
            }
        };
        let inputs: Vec<usize> = value.into_iter().chain(here).collect();
        value = if number == 0 { here } else { Some(add("reduce", None, &inputs)) };
    }
    let ready: Vec<usize> = value.into_iter().collect();
    if step.store {
        add("store", None, &ready);
    }
    let sends = match &step.outgoing {
        Outgoing::Nothing => return list,
        // What is forwarded goes on as it came, once it has verified.
        Outgoing::Forward(_) => opened,
        Outgoing::Seal(_) => vec![add("seal", None, &ready)],
    };
    for &peer in step.outgoing.peers() {
        add(if forwards { "forward" } else { "send" }, Some(peer), &sends);
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_has_the_schedules_operations() {
        for (algorithm, crypto) in [("ring", 12), ("relay", 10), ("direct", 10)] {
            let value: serde_json::Value = serde_json::from_str(&schedule(algorithm, &[4]).unwrap()).unwrap();
            for program in value["programs"].as_array().unwrap() {
                let operations = program.as_array().unwrap();
                let count = |name: &str| operations.iter().filter(|one| one["operation"] == name).count();
                assert_eq!(count("seal") + count("open"), crypto, "{algorithm}");
                assert_eq!(count("reduce"), 3);
                assert_eq!(count("store"), 4);
                assert_eq!(count("send") + count("forward"), 6);
                assert_eq!(count("forward"), if algorithm == "relay" { 2 } else { 0 });
                for (place, operation) in operations.iter().enumerate() {
                    let after = operation["after"].as_array().unwrap();
                    assert!(after.iter().all(|at| at.as_u64().unwrap() < place as u64));
                }
            }
        }
        assert!(schedule("star", &[4]).is_err());
        assert!(schedule("ring", &[2, 4]).is_err());
        assert!(schedule("ring", &[0]).is_err());
    }
}
