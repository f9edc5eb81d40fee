//! One attempt as a fold over what its nodes say: whether it still runs, what went wrong first, how far it came.
//!
//! Pure: no clock, no I/O. Deliberately left out: what is done about a failure (supervise).

use std::collections::BTreeMap;
use std::time::Duration;

use trainyard_spec::event::{Failure, FailureClass, TrainerEvent};
use trainyard_spec::plan::NodePlan;
use trainyard_spec::protocol::{NodeEvent, RankStatus, StopReason, Stream};

use crate::engine::NodeExit;
use crate::plan::hostname;

/// Lines of standard error kept as a rank's last words.
const LAST_WORDS: usize = 3;

/// How telling a failure is. When one rank fails, its peers fail after it, and messages from several nodes may arrive in
/// another order than things happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Weight {
    /// It said what is wrong, or was killed: nothing a lost peer makes a program do.
    Cause,
    /// It exited by itself without a reason; a lost peer may be behind it.
    Unexplained,
    /// It says that it lost its peers.
    Consequence,
}

#[derive(Debug, Default)]
struct Rank {
    reported: Option<(FailureClass, String)>,
    last_words: Vec<String>,
    exit: Option<RankStatus>,
}

#[derive(Debug, Default)]
struct Node {
    ranks: BTreeMap<u32, Rank>,
    stopping: bool,
    over: bool,
    gone: bool,
}

/// The state of an attempt.
#[derive(Debug)]
pub(crate) struct Attempt {
    nodes: Vec<Node>,
    suspects: Vec<(Weight, Failure)>,
    checkpoint: Option<u64>,
    /// Whether the training program has said that all steps are done.
    done: bool,
    stopping: bool,
}

impl Attempt {
    pub(crate) fn new(nodes: &[NodePlan]) -> Self {
        let node = |plan: &NodePlan| Node {
            ranks: plan.ranks.iter().map(|rank| (rank.rank, Rank::default())).collect(),
            ..Node::default()
        };
        Self {
            nodes: nodes.iter().map(node).collect(),
            suspects: Vec::new(),
            checkpoint: None,
            done: false,
            stopping: false,
        }
    }

    /// An agent said something.
    pub(crate) fn said(&mut self, index: u32, event: &NodeEvent) {
        let Some(node) = self.nodes.get_mut(index as usize) else { return };
        match event {
            NodeEvent::Ready
            | NodeEvent::Alive
            | NodeEvent::RankStarted { .. }
            | NodeEvent::OutputLost { .. } => {}
            NodeEvent::Trainer { rank, said: TrainerEvent::Failed { class, message } } => {
                if let Some(rank) = node.ranks.get_mut(rank) {
                    rank.reported = Some((*class, message.clone()));
                }
            }
            NodeEvent::Trainer { said: TrainerEvent::Checkpoint { step, .. }, .. } => {
                self.checkpoint = self.checkpoint.max(Some(*step));
            }
            NodeEvent::Trainer { said: TrainerEvent::Finished { .. }, .. } => self.done = true,
            NodeEvent::Trainer { .. } | NodeEvent::Output { stream: Stream::Stdout, .. } => {}
            NodeEvent::Output { rank, line, .. } => {
                if let Some(rank) = node.ranks.get_mut(rank).filter(|_| !line.trim().is_empty()) {
                    if rank.last_words.len() == LAST_WORDS {
                        rank.last_words.remove(0);
                    }
                    rank.last_words.push(line.clone());
                }
            }
            NodeEvent::RankExited { rank: number, status } => {
                let asked = self.stopping || node.stopping;
                let Some(rank) = node.ranks.get_mut(number) else { return };
                rank.exit = Some(*status);
                // Ranks that are being stopped end as they can; only a cause of their own still counts.
                if let Some((weight, class, message)) = judge(rank, *status)
                    && (!asked || (weight == Weight::Cause && rank.reported.is_some()))
                {
                    let failure = Failure { node: Some(index), rank: Some(*number), class, message };
                    self.suspects.push((weight, failure));
                }
            }
            NodeEvent::Stopping { reason } => {
                node.stopping = true;
                if *reason == StopReason::LeaseExpired && !self.stopping {
                    let message = "its lease ran out: the controller did not renew it in time".to_owned();
                    self.suspect_node(index, Weight::Cause, FailureClass::Host, message);
                }
            }
            NodeEvent::Broken { message } => {
                node.over = true;
                let message = message.clone();
                self.suspect_node(index, Weight::Cause, FailureClass::Host, message);
            }
            NodeEvent::Done => node.over = true,
        }
    }

    /// An agent that should have said something has not: it hangs, or its machine does.
    pub(crate) fn silent(&mut self, index: u32, time: Duration) {
        if !self.stopping && self.nodes.get(index as usize).is_some_and(|node| !node.gone) {
            let message =
                format!("{} hangs: its agent has said nothing for {} s", hostname(index), time.as_secs());
            self.suspect_node(index, Weight::Cause, FailureClass::Host, message);
        }
    }

    /// An agent's process has ended, and all that it said is known.
    pub(crate) fn gone(&mut self, index: u32, exit: &NodeExit) {
        let Some(node) = self.nodes.get_mut(index as usize) else { return };
        node.gone = true;
        if !node.over && !self.stopping {
            let (class, memory) = match exit.out_of_memory {
                true => (FailureClass::OutOfMemory, ": out of memory"),
                false => (FailureClass::Host, ""),
            };
            let message = format!("{} {} before its ranks had ended{memory}", hostname(index), exit.how);
            self.suspect_node(index, Weight::Cause, class, message);
        }
    }

    fn suspect_node(&mut self, node: u32, weight: Weight, class: FailureClass, message: String) {
        self.suspects.push((weight, Failure { node: Some(node), rank: None, class, message }));
    }

    /// From here on, what ends was told to.
    pub(crate) fn stop(&mut self) {
        self.stopping = true;
    }

    /// Whether anything has failed.
    pub(crate) fn failed(&self) -> bool {
        !self.suspects.is_empty()
    }

    /// The most telling failure, and of those the first that was heard of.
    pub(crate) fn first_cause(&self) -> Option<Failure> {
        self.suspects.iter().min_by_key(|(weight, _)| *weight).map(|(_, failure)| failure.clone())
    }

    /// Whether all agents have ended.
    pub(crate) fn all_gone(&self) -> bool {
        self.nodes.iter().all(|node| node.gone)
    }

    /// Whether all ranks have ended well, and by themselves: one that is told to stop may end well, too.
    pub(crate) fn ended_well(&self) -> bool {
        let well = |rank: &Rank| rank.exit == Some(RankStatus::Code(0));
        self.nodes.iter().all(|node| !node.stopping && node.ranks.values().all(well))
    }

    /// Whether all ranks have ended well and the training program has said that all steps are done. A program that does
    /// nothing ends well, too.
    pub(crate) fn finished(&self) -> bool {
        self.done && self.ended_well()
    }

    /// Steps in the newest complete checkpoint of this attempt.
    pub(crate) fn checkpoint(&self) -> Option<u64> {
        self.checkpoint
    }
}

fn judge(rank: &Rank, status: RankStatus) -> Option<(Weight, FailureClass, String)> {
    // Shells and some launchers report a child's signal as 128 + its number.
    let (code, signal) = match status {
        RankStatus::Code(0) => return None,
        RankStatus::Code(code) if code > 128 && code <= 192 => (None, Some(code - 128)),
        RankStatus::Code(code) => (Some(code), None),
        RankStatus::Signal(signal) => (None, Some(signal)),
    };
    let how = if matches!(status, RankStatus::Signal(_)) { "killed" } else { "stopped" };
    if let Some((class, message)) = &rank.reported {
        let weight = match class {
            FailureClass::Network => Weight::Consequence,
            FailureClass::Unknown => Weight::Unexplained,
            FailureClass::User | FailureClass::Host | FailureClass::OutOfMemory => Weight::Cause,
        };
        return Some((weight, *class, message.clone()));
    }
    let words = match rank.last_words.as_slice() {
        [] => String::new(),
        words => format!(": {}", words.join(" | ")),
    };
    Some(match (code, signal) {
        (_, Some(signal)) => {
            (Weight::Cause, FailureClass::Unknown, format!("was {how} by signal {signal}{words}"))
        }
        (code, _) => {
            let code = code.unwrap_or_default();
            (Weight::Unexplained, FailureClass::User, format!("exited with code {code}{words}"))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(nodes: u32) -> Attempt {
        let ranks = |node| BTreeMap::from([(node, Rank::default())]);
        let nodes = (0..nodes).map(|node| Node { ranks: ranks(node), ..Node::default() }).collect();
        Attempt { nodes, suspects: Vec::new(), checkpoint: None, done: false, stopping: false }
    }

    fn exit(rank: u32, status: RankStatus) -> (u32, NodeEvent) {
        (rank, NodeEvent::RankExited { rank, status })
    }

    fn reports(rank: u32, class: FailureClass) -> (u32, NodeEvent) {
        let said = TrainerEvent::Failed { class, message: format!("{class:?}") };
        (rank, NodeEvent::Trainer { rank, said })
    }

    #[test]
    fn the_first_cause_is_named_whatever_arrives_first() {
        use FailureClass::{Host, Network, Unknown, User};
        use RankStatus::{Code, Signal};
        let cases = [
            (vec![exit(1, Signal(9))], 1, Unknown),
            (vec![reports(0, Network), exit(0, Code(1)), exit(1, Signal(9))], 1, Unknown),
            (vec![exit(0, Code(1)), exit(1, Signal(9))], 1, Unknown),
            (vec![exit(0, Code(1)), exit(1, Code(137))], 1, Unknown),
            (vec![reports(0, Network), exit(0, Code(143)), exit(1, Code(143))], 1, Unknown),
            (vec![exit(0, Code(1)), reports(1, Host), exit(1, Code(7))], 1, Host),
            (vec![reports(0, Network), exit(0, Code(1)), exit(1, Code(3))], 1, User),
            (vec![exit(0, Code(1)), exit(1, Code(1))], 0, User),
            (vec![reports(1, Network), exit(1, Code(1)), reports(0, Network), exit(0, Code(1))], 1, Network),
            (vec![(0, NodeEvent::Broken { message: String::new() }), exit(1, Signal(9))], 0, Host),
        ];
        for (events, node, class) in cases {
            let mut attempt = attempt(2);
            for (node, event) in &events {
                attempt.said(*node, event);
            }
            let cause = attempt.first_cause().expect("something failed");
            assert_eq!((cause.node, cause.class), (Some(node), class), "{events:?}");
        }
    }

    #[test]
    fn what_is_told_to_stop_has_not_failed() {
        let mut attempt = attempt(2);
        attempt.said(0, &NodeEvent::Stopping { reason: StopReason::Asked });
        attempt.said(0, &exit(0, RankStatus::Signal(15)).1);
        assert!(!attempt.failed());
        attempt.stop();
        attempt.said(1, &exit(1, RankStatus::Code(1)).1);
        attempt.gone(1, &NodeExit { how: "was killed by signal 9".to_owned(), out_of_memory: false });
        assert!(!attempt.failed() && !attempt.finished() && !attempt.all_gone());
        let mut polite = self::attempt(1);
        polite.said(0, &NodeEvent::Stopping { reason: StopReason::Asked });
        polite.said(0, &exit(0, RankStatus::Code(0)).1);
        assert!(!polite.failed() && !polite.finished());
    }
}
