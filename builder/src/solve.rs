//! Which packages of a distribution go together: those asked for, and what they need.
//!
//! The search is resolvo's. Here is what it means for packages of any kind: one version of a name at a time, alternatives
//! in the order in which a package names them, newest versions first, and nothing that is merely recommended. Deliberately
//! left out: how a kind writes its dependencies and compares its versions, which is its [`Packages`].

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Display;
use std::ops::Range;

use resolvo::conflict::{ConflictCause, ConflictEdge, ConflictGraph, ConflictNode};
use resolvo::{
    Candidates, Condition, ConditionId, ConditionalRequirement, DenseIndex, Dependencies, DependencyProvider,
    Interner, KnownDependencies, LogicalOperator, NameId, Problem, Requirement, SolvableId, Solver,
    SolverCache, StringId, UnsolvableOrCancelled, VersionSetId, VersionSetUnionId,
};

/// Reasons named when nothing fits.
const REASONS_NAMED: usize = 3;

/// A package, by its place in the list.
pub(crate) type Id = usize;

/// Packages of one kind that may be taken: a list that is sorted by name, and for each name has the best version first.
pub(crate) trait Packages {
    /// How many there are.
    fn count(&self) -> usize;
    /// A package's name. Of one name, only one package is taken.
    fn name(&self, id: Id) -> &str;
    /// Its version, as the kind writes it.
    fn version(&self, id: Id) -> &str;
    /// What it needs and what it excludes, or why that cannot be known, so that it is not taken.
    fn dependencies(&self, id: Id) -> Result<Needs, String>;
}

/// What a package needs and excludes.
#[derive(Debug, Default)]
pub(crate) struct Needs {
    /// Every one of these.
    pub(crate) needs: Vec<Need>,
    /// None of these.
    pub(crate) excludes: Vec<Exclusion>,
}

/// Something needed.
#[derive(Debug, Clone)]
pub(crate) struct Need {
    /// As the package says it.
    pub(crate) what: String,
    /// The packages any of which will do, the preferred one first.
    pub(crate) any_of: Vec<Id>,
    /// If this is not empty, it is needed only where one of these is taken.
    pub(crate) only_with: Vec<Id>,
    /// What there is of that name, for people, where nothing will do.
    pub(crate) there_is: String,
}

/// Packages that may not be taken together with another.
#[derive(Debug, Clone)]
pub(crate) struct Exclusion {
    /// As the package says it.
    pub(crate) what: String,
    /// The packages.
    pub(crate) packages: Vec<Id>,
}

/// Finds packages that give all that is asked for, with everything they need, sorted.
///
/// # Errors
/// When nothing fits: who needs what, at which version, and what there is.
pub(crate) fn solve(packages: &dyn Packages, asked: &[Need]) -> Result<Vec<Id>, String> {
    let space = Space::new(packages);
    let requirements = asked.iter().map(|need| space.requirement(need)).collect();
    let mut solver = Solver::new(space);
    match solver.solve(Problem::new().requirements(requirements)) {
        Ok(taken) => {
            let mut taken: Vec<Id> = taken.into_iter().map(DenseIndex::to_index).collect();
            taken.sort_unstable();
            Ok(taken)
        }
        Err(UnsolvableOrCancelled::Unsolvable(conflict)) => {
            Err(explain(&conflict.graph(&solver), solver.provider()))
        }
        // Nothing here cancels.
        Err(UnsolvableOrCancelled::Cancelled(_)) => Err("the search was cancelled".to_owned()),
    }
}

/// Packages as resolvo sees them.
struct Space<'a> {
    packages: &'a dyn Packages,
    /// The name of each package.
    name_of: Vec<NameId>,
    /// The packages of each name.
    named: Vec<Range<Id>>,
    made: RefCell<Made>,
}

/// What has been handed to resolvo.
#[derive(Default)]
struct Made {
    sets: Vec<(NameId, BTreeSet<Id>)>,
    unions: Vec<Vec<VersionSetId>>,
    conditions: Vec<Condition>,
    strings: Vec<String>,
    needs: BTreeMap<Requirement, Need>,
    exclusions: BTreeMap<VersionSetId, String>,
}

impl<'a> Space<'a> {
    fn new(packages: &'a dyn Packages) -> Self {
        let mut name_of = Vec::with_capacity(packages.count());
        let mut named: Vec<Range<Id>> = Vec::new();
        for id in 0..packages.count() {
            match named.last_mut() {
                Some(range) if packages.name(range.start) == packages.name(id) => range.end = id + 1,
                _ => named.push(id..id + 1),
            }
            name_of.push(NameId::from_index(named.len() - 1));
        }
        Self { packages, name_of, named, made: RefCell::default() }
    }

    /// The packages by name, names in the order of their first package.
    fn by_name(&self, ids: &[Id]) -> Vec<(NameId, BTreeSet<Id>)> {
        let mut groups: Vec<(NameId, BTreeSet<Id>)> = Vec::new();
        for &id in ids {
            let name = self.name_of[id];
            match groups.iter_mut().find(|(other, _)| *other == name) {
                Some((_, set)) => drop(set.insert(id)),
                None => groups.push((name, [id].into())),
            }
        }
        groups
    }

    fn set(&self, name: NameId, packages: BTreeSet<Id>) -> VersionSetId {
        let mut made = self.made.borrow_mut();
        made.sets.push((name, packages));
        VersionSetId::from_index(made.sets.len() - 1)
    }

    fn requirement(&self, need: &Need) -> ConditionalRequirement {
        // What nothing gives is a set of a name that nothing has.
        let nobody = NameId::from_index(self.named.len());
        let mut sets: Vec<_> =
            self.by_name(&need.any_of).into_iter().map(|(name, set)| self.set(name, set)).collect();
        if sets.is_empty() {
            sets.push(self.set(nobody, BTreeSet::new()));
        }
        let requirement = match sets.as_slice() {
            [only] => Requirement::Single(*only),
            _ => {
                let mut made = self.made.borrow_mut();
                made.unions.push(sets);
                Requirement::Union(VersionSetUnionId::from_index(made.unions.len() - 1))
            }
        };
        self.made.borrow_mut().needs.insert(requirement, need.clone());
        let mut condition = None;
        for (name, set) in self.by_name(&need.only_with) {
            let set = self.set(name, set);
            let this = self.condition(Condition::Requirement(set));
            condition = Some(match condition {
                None => this,
                Some(before) => self.condition(Condition::Binary(LogicalOperator::Or, before, this)),
            });
        }
        ConditionalRequirement { condition, requirement }
    }

    fn condition(&self, condition: Condition) -> ConditionId {
        let mut made = self.made.borrow_mut();
        made.conditions.push(condition);
        ConditionId::from_index(made.conditions.len() - 1)
    }

    fn shown(&self, id: SolvableId) -> String {
        let id = id.to_index();
        format!("{} {}", self.packages.name(id), self.packages.version(id))
    }
}

impl Interner for Space<'_> {
    type NameId = NameId;
    type SolvableId = SolvableId;

    fn display_solvable(&self, solvable: SolvableId) -> impl Display + '_ {
        self.shown(solvable)
    }

    fn display_name(&self, name: NameId) -> impl Display + '_ {
        self.named.get(name.to_index()).map_or("", |range| self.packages.name(range.start))
    }

    fn display_version_set(&self, set: VersionSetId) -> impl Display + '_ {
        format!("{:?}", self.made.borrow().sets[set.to_index()].1)
    }

    fn display_string(&self, string: StringId) -> impl Display + '_ {
        self.made.borrow().strings[string.to_index()].clone()
    }

    fn version_set_name(&self, set: VersionSetId) -> NameId {
        self.made.borrow().sets[set.to_index()].0
    }

    fn solvable_name(&self, solvable: SolvableId) -> NameId {
        self.name_of[solvable.to_index()]
    }

    fn version_sets_in_union(&self, union: VersionSetUnionId) -> impl Iterator<Item = VersionSetId> {
        self.made.borrow().unions[union.to_index()].clone().into_iter()
    }

    fn resolve_condition(&self, condition: ConditionId) -> Condition {
        self.made.borrow().conditions[condition.to_index()].clone()
    }
}

impl DependencyProvider for Space<'_> {
    async fn filter_candidates(
        &self,
        candidates: &[SolvableId],
        set: VersionSetId,
        inverse: bool,
    ) -> Vec<SolvableId> {
        let made = self.made.borrow();
        let (_, set) = &made.sets[set.to_index()];
        candidates.iter().copied().filter(|one| set.contains(&one.to_index()) != inverse).collect()
    }

    async fn get_candidates(&self, name: NameId) -> Option<Candidates> {
        let range = self.named.get(name.to_index())?;
        Some(Candidates {
            candidates: range.clone().map(SolvableId::from_index).collect(),
            ..Candidates::default()
        })
    }

    async fn sort_candidates(&self, _: &SolverCache<Self>, solvables: &mut [SolvableId]) {
        solvables.sort_unstable();
    }

    async fn get_dependencies(&self, solvable: SolvableId) -> Dependencies {
        let id = solvable.to_index();
        let Needs { needs, excludes } = match self.packages.dependencies(id) {
            Ok(needs) => needs,
            Err(reason) => {
                let mut made = self.made.borrow_mut();
                made.strings.push(reason);
                return Dependencies::Unknown(StringId::from_index(made.strings.len() - 1));
            }
        };
        let requirements = needs.iter().map(|need| self.requirement(need)).collect();
        let mut constrains = Vec::new();
        for Exclusion { what, packages } in excludes {
            for (name, excluded) in self.by_name(&packages) {
                // Another version of itself is never taken anyway.
                if name == self.name_of[id] {
                    continue;
                }
                let allowed =
                    self.named[name.to_index()].clone().filter(|id| !excluded.contains(id)).collect();
                let set = self.set(name, allowed);
                self.made.borrow_mut().exclusions.insert(set, what.clone());
                constrains.push(set);
            }
        }
        Dependencies::Known(KnownDependencies { requirements, constrains })
    }
}

/// Why nothing fits, from what resolvo found to contradict itself: the shortest ways from what is asked for to what is
/// missing or excluded.
fn explain(found: &ConflictGraph, space: &Space<'_>) -> String {
    let graph = &found.graph;
    // The shortest way to each node: the node before it, and what that one needs.
    let mut before = BTreeMap::new();
    let mut next = VecDeque::from([found.root_node]);
    let mut edges: Vec<_> = graph
        .edge_indices()
        .filter_map(|edge| graph.edge_endpoints(edge).map(|ends| (ends, &graph[edge])))
        .collect();
    edges.sort();
    while let Some(at) = next.pop_front() {
        for ((from, to), edge) in edges.iter().filter(|((from, _), _)| *from == at) {
            if let ConflictEdge::Requires(requirement) = edge
                && *to != found.root_node
                && matches!(graph[*to], ConflictNode::Solvable(_))
                && !before.contains_key(to)
            {
                before.insert(*to, (*from, *requirement));
                next.push_back(*to);
            }
        }
    }
    let made = space.made.borrow();
    let name = |node| match graph[node] {
        ConflictNode::Solvable(id) => space.shown(id),
        _ => "what is asked for".to_owned(),
    };
    let what = |requirement: &Requirement| made.needs.get(requirement).map_or("", |need| need.what.as_str());
    // "a 1 needs b (>= 2), b 3 needs c"
    let way = |mut node| {
        let mut steps = Vec::new();
        while let Some((from, requirement)) = before.get(&node) {
            if *from != found.root_node {
                steps.push(format!("{} needs {}", name(*from), what(requirement)));
            }
            node = *from;
        }
        steps.reverse();
        steps
    };
    let mut reasons = BTreeSet::new();
    for ((from, to), edge) in &edges {
        let mut steps = way(*from);
        let last = match (edge, &graph[*to]) {
            (ConflictEdge::Requires(requirement), ConflictNode::UnresolvedDependency) => {
                let need = made.needs.get(requirement);
                let (what, there_is) =
                    need.map_or(("", ""), |need| (need.what.as_str(), need.there_is.as_str()));
                format!("{} needs {what}, {there_is}", name(*from))
            }
            (ConflictEdge::Conflict(ConflictCause::Constrains(set)), ConflictNode::Solvable(_)) => {
                let what = made.exclusions.get(set).map_or("", String::as_str);
                steps.extend(way(*to));
                format!("{} excludes {what}, which is {}", name(*from), name(*to))
            }
            (ConflictEdge::Conflict(ConflictCause::ForbidMultipleInstances), ConflictNode::Solvable(_)) => {
                steps.extend(way(*to));
                format!("{} and {} cannot both be there", name(*from), name(*to))
            }
            (ConflictEdge::Conflict(ConflictCause::Excluded), ConflictNode::Excluded(reason)) => {
                format!("{} cannot be taken: {}", name(*from), made.strings[reason.to_index()])
            }
            _ => continue,
        };
        steps.push(last);
        steps.dedup();
        reasons.insert((steps.len(), steps.join("; ")));
    }
    let reasons: Vec<_> = reasons.into_iter().take(REASONS_NAMED).map(|(_, reason)| reason).collect();
    reasons.join(". Also, ")
}
