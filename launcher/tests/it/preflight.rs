//! What this machine cannot bear is refused with numbers and a way out.

use trainyard_launcher::machine::Machine;
use trainyard_launcher::preflight::preflight;

use crate::lab::Lab;

#[test]
fn four_nodes_fit_and_ten_thousand_do_not() {
    let lab = Lab::process();
    let machine = Machine::read().unwrap();
    let report = preflight(&lab.plan("few-1", 4, 0, "true"), &machine);
    assert!(report.passed(), "{report:#?}");
    let report = preflight(&lab.plan("many-1", 10_000, 0, "true"), &machine);
    let refused: Vec<_> = report.checks.iter().filter(|check| !check.passed).collect();
    assert!(!refused.is_empty());
    for check in refused {
        assert!(check.fix.starts_with("ask for fewer nodes: --nodes "), "{check:?}");
        let fewer: u32 = check.fix.rsplit(' ').next().unwrap().parse().unwrap();
        let retried = preflight(&lab.plan("fewer-1", fewer, 0, "true"), &machine);
        assert!(retried.checks.iter().any(|again| again.name == check.name && again.passed), "{check:?}");
    }
}

#[test]
fn folders_that_cannot_be_used() {
    let lab = Lab::process();
    let machine = Machine::read().unwrap();
    let mut launch_in_proc = lab.plan("folders-1", 1, 0, "true");
    launch_in_proc.run_dir = "/proc/self/job".to_owned();
    let report = preflight(&launch_in_proc, &machine);
    let check = report.checks.iter().find(|check| check.name == "run directory").unwrap();
    assert!(!check.passed && check.fix.contains("TRAINYARD_HOME"), "{check:?}");

    let mut launch_without_data = lab.plan("folders-2", 1, 0, "true");
    launch_without_data.mounts[1].host = "/nowhere/data".to_owned();
    let report = preflight(&launch_without_data, &machine);
    let check = report.checks.iter().find(|check| check.name == "data").unwrap();
    assert!(!check.passed && check.found.contains("/nowhere/data"), "{check:?}");
}
