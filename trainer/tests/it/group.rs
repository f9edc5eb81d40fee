//! Ranks that find each other, or do not, and ranks that are lost.

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use trainyard_spec::Digest;
use trainyard_spec::event::{FailureClass, TrainerEvent};
use trainyard_trainer::dist::rendezvous::Rendezvous;
use trainyard_trainer::dist::{CollectiveError, Communicator, Fault, Purpose};

use crate::ranks::{Job, Lab, PORT, Rank, address, job};

fn endless(world_size: u32) -> Job {
    job(world_size, "c").with("steps", 1_000_000.0).with("checkpoint-every", 1_000_000.0)
}

fn started(ranks: &[Rank]) {
    ranks[0].wait_for(|event| matches!(event, TrainerEvent::Step { step: 3.., .. }));
}

#[test]
fn survivors_of_a_killed_rank_leave_with_a_network_failure() {
    let lab = Lab::new();
    let mut ranks = lab.start(&endless(4));
    started(&ranks);
    let killed = ranks.remove(2);
    let start = Instant::now();
    killed.signal(Signal::KILL);
    drop(killed.wait());
    let messages: Vec<String> = ranks
        .into_iter()
        .map(|survivor| {
            let ended = survivor.wait();
            ended.fails(FailureClass::Network, "lost rank");
            ended.failure().1.to_owned()
        })
        .collect();
    assert!(messages.iter().any(|message| message.contains("lost rank 2 in ")), "{messages:?}");
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

#[test]
fn a_rank_that_hangs_is_given_up_after_the_timeout() {
    let lab = Lab::new();
    let mut ranks = lab.start(&Job { timeout: 2, ..endless(3) });
    started(&ranks);
    let stopped = ranks.remove(1);
    let start = Instant::now();
    stopped.signal(Signal::STOP);
    let failures: Vec<String> = ranks
        .into_iter()
        .map(|rank| {
            let ended = rank.wait();
            let (class, message) = ended.failure();
            assert_eq!(class, FailureClass::Network, "{message}");
            message.to_owned()
        })
        .collect();
    let waited = start.elapsed();
    stopped.signal(Signal::KILL);
    drop(stopped.wait());
    assert!((1.0..6.0).contains(&waited.as_secs_f64()), "{waited:?}");
    assert!(failures.iter().any(|message| message.contains("nothing moved for 2 s")), "{failures:?}");
}

#[test]
fn strays_are_turned_away_and_the_group_still_forms() {
    let lab = Lab::new();
    let (job, at) = (job(2, "c"), address());
    let first = lab.start_rank(&job, 0, at, "this-attempt");
    let stray = lab.start_rank(&job, 1, at, "earlier-attempt").wait();
    stray.fails(
        FailureClass::Network,
        "its run id is \"earlier-attempt\", that of this attempt is \"this-attempt\"",
    );
    let differing = lab.start_rank(&job.clone().with("seed", 8.0), 1, at, "this-attempt").wait();
    differing.fails(FailureClass::User, "its configuration or data differ from rank 0's");
    let mut silent = TcpStream::connect((at, PORT)).unwrap();
    let mut noise = TcpStream::connect((at, PORT)).unwrap();
    noise.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    silent.write_all(b"\x05").unwrap();
    let second = lab.start_rank(&job, 1, at, "this-attempt");
    for rank in [first, second] {
        let ended = rank.wait();
        assert!(ended.status.success(), "{ended:?}");
    }
}

#[test]
fn a_group_that_does_not_form_says_who_is_missing() {
    let lab = Lab::new();
    let (job, at) = (Job { timeout: 1, ..job(4, "c") }, address());
    let first = lab.start_rank(&job, 0, at, "run");
    let stray = lab.start_rank(&job, 3, at, "old");
    let second = lab.start_rank(&job, 2, at, "run");
    let ended = first.wait();
    ended.fails(FailureClass::Network, "2 of 4 ranks came within 1 s; missing: 1, 3; turned away: ");
    stray.wait().fails(FailureClass::Network, "refused this rank");
    second.wait().fails(FailureClass::Network, "rank 0 could not be reached");
    let alone = lab.start_rank(&job, 1, address(), "run").wait();
    alone.fails(FailureClass::Network, "could not be reached");
}

#[test]
fn a_taken_port_is_named() {
    let lab = Lab::new();
    let at = address();
    let _taken = TcpListener::bind((at, PORT)).unwrap();
    let ended = lab.start_rank(&job(2, "c"), 0, at, "run").wait();
    ended.fails(FailureClass::Host, &format!("cannot listen on {at}:{PORT}"));
    ended.fails(FailureClass::Host, "give the job another one");
}

/// Runs `work` as each rank of a group, on threads.
fn group<T: Send>(world_size: u32, work: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    let at = address();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world_size)
            .map(|rank| {
                let work = &work;
                scope.spawn(move || {
                    let rendezvous = Rendezvous {
                        rank,
                        world_size,
                        master_addr: at.to_string(),
                        master_port: PORT,
                        run_id: "threads".to_owned(),
                        agreement: Digest::of(b""),
                        patience: Duration::from_secs(20),
                    };
                    work(Communicator::connect(&rendezvous).unwrap())
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

const PURPOSE: Purpose = Purpose { name: "test", step: 0 };

#[test]
fn all_reduce_sums_any_length_to_the_same_bits() {
    for world_size in [1, 2, 3, 5] {
        let lengths = [0, 1, 2, world_size as usize + 1, 1000, 300_001];
        // Values whose sum depends on the order, so that equal bits mean an equal order.
        let value =
            |rank: u32, i: usize| ((i * 7919 + 13) % 1000) as f32 * 1.1_f32.powi(rank as i32 * 9) - 300.0;
        let sums = group(world_size, |communicator| {
            let rank = communicator.rank();
            let own = |&length: &usize| (0..length).map(|i| value(rank, i)).collect();
            // All under way at once.
            let pending: Vec<_> =
                lengths.iter().map(|length| communicator.start_all_reduce(PURPOSE, own(length))).collect();
            pending.into_iter().map(|pending| pending.wait().unwrap()).collect::<Vec<_>>()
        });
        for (index, &length) in lengths.iter().enumerate() {
            assert_eq!(sums[0][index].len(), length);
            for (i, &found) in sums[0][index].iter().enumerate() {
                let exact: f64 = (0..world_size).map(|rank| f64::from(value(rank, i))).sum();
                assert!(
                    (f64::from(found) - exact).abs() <= 1e-5 * exact.abs().max(1000.0),
                    "{found} {exact}"
                );
            }
            assert!(
                sums.iter().all(|rank| rank[index] == sums[0][index]),
                "{world_size} ranks, length {length}"
            );
        }
    }
}

#[test]
fn small_facts_reach_all_ranks() {
    let results = group(3, |communicator| {
        let rank = communicator.rank();
        let parts = communicator.all_gather(PURPOSE, vec![rank as u8; rank as usize * 100_000]).unwrap();
        let sum = communicator.sum(PURPOSE, [f64::from(rank), 0.1]).unwrap();
        let said = communicator.broadcast(PURPOSE, vec![rank as u8 + 7; 3]).unwrap();
        communicator.barrier(PURPOSE).unwrap();
        (parts, sum, said)
    });
    for (parts, sum, said) in results {
        for (rank, part) in parts.iter().enumerate() {
            assert!(part.len() == rank * 100_000 && part.iter().all(|&byte| byte as usize == rank));
        }
        assert_eq!(sum, [3.0, 0.1 + 0.1 + 0.1]);
        assert_eq!(said, [7, 7, 7]);
    }
}

#[test]
fn ranks_out_of_step_find_out() {
    let results = group(2, |communicator| match communicator.rank() {
        0 => communicator.start_all_reduce(PURPOSE, vec![0.0; 10]).wait().map(drop),
        _ => communicator.start_all_reduce(PURPOSE, vec![0.0; 11]).wait().map(drop),
    });
    let out_of_step = |result: &Result<(), CollectiveError>| {
        matches!(result, Err(CollectiveError::Lost { fault: Fault::OutOfStep { .. }, .. }))
    };
    // The first to notice leaves, and the other may see that first.
    assert!(results.iter().all(Result::is_err) && results.iter().any(out_of_step), "{results:?}");
}
