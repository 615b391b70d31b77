//! Queries are read as Prometheus reads them, and may name nothing that `docs/metrics.md` does not.

use std::collections::{BTreeMap, BTreeSet};

use promql_parser::label::MatchOp;
use promql_parser::parser::{self, Expr, LabelModifier, VectorSelector};

use crate::tools::text;

/// Metrics that Prometheus makes itself.
const PROMETHEUS: [&str; 1] = ["up"];
/// Labels that Prometheus gives to all that it scrapes.
const SCRAPED: [&str; 2] = ["job", "instance"];

type Labels = BTreeSet<String>;

/// The table of `docs/metrics.md`, which another test holds against what is exposed.
pub(crate) struct Reference {
    series: BTreeMap<String, Series>,
}

#[derive(Clone)]
struct Series {
    labels: Labels,
    /// What is told of it, where the values of labels stand in backticks.
    told: String,
}

impl Reference {
    pub(crate) fn read() -> Self {
        let mut reference = Self { series: BTreeMap::new() };
        let text = text("docs/metrics.md");
        for line in text.lines().filter(|line| line.starts_with("| `weighbridge_")) {
            let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
            let (name, kind) = (cells[0].trim_matches('`'), cells[1]);
            let labels = cells[3].split(',').map(|label| label.trim().trim_matches('`').to_owned());
            let mut labels: Labels = labels.filter(|label| !label.is_empty()).collect();
            labels.extend(SCRAPED.map(str::to_owned));
            let series = Series { labels, told: cells[4].to_owned() };
            if kind == "histogram" {
                let mut bars = series.clone();
                bars.labels.insert("le".to_owned());
                reference.series.insert(format!("{name}_bucket"), bars);
                reference.series.insert(format!("{name}_count"), series.clone());
                reference.series.insert(format!("{name}_sum"), series);
            } else {
                reference.series.insert(name.to_owned(), series);
            }
        }
        assert!(!reference.series.is_empty(), "docs/metrics.md has no table of metrics");
        for name in PROMETHEUS {
            let series = Series { labels: SCRAPED.map(str::to_owned).into(), told: String::new() };
            reference.series.insert(name.to_owned(), series);
        }
        reference
    }

    /// Checks a query, and tells the labels that its results may have.
    pub(crate) fn check(&self, query: &str) -> Result<Labels, String> {
        let parsed = parser::parse(query).map_err(|error| format!("{query}: {error}"))?;
        self.labels_of(&parsed).map_err(|what| format!("{query}: {what}"))
    }

    fn labels_of(&self, expression: &Expr) -> Result<Labels, String> {
        match expression {
            Expr::VectorSelector(selector) => self.selected(selector),
            Expr::MatrixSelector(selector) => self.selected(&selector.vs),
            Expr::Paren(inner) => self.labels_of(&inner.expr),
            Expr::Unary(inner) => self.labels_of(&inner.expr),
            Expr::Subquery(inner) => self.labels_of(&inner.expr),
            Expr::Binary(inner) => {
                let mut labels = self.labels_of(&inner.lhs)?;
                labels.extend(self.labels_of(&inner.rhs)?);
                Ok(labels)
            }
            Expr::Call(call) => {
                let mut labels = Labels::new();
                for argument in &call.args.args {
                    labels.extend(self.labels_of(argument)?);
                }
                Ok(labels)
            }
            Expr::Aggregate(aggregate) => {
                let labels = self.labels_of(&aggregate.expr)?;
                match &aggregate.modifier {
                    None => Ok(Labels::new()),
                    Some(modifier) => kept(labels, modifier),
                }
            }
            Expr::NumberLiteral(_) | Expr::StringLiteral(_) | Expr::Extension(_) => Ok(Labels::new()),
        }
    }

    fn selected(&self, selector: &VectorSelector) -> Result<Labels, String> {
        let name = selector.name.as_deref().unwrap_or_default();
        let series = self.series.get(name).ok_or_else(|| format!("docs/metrics.md has no {name:?}"))?;
        for matcher in &selector.matchers.matchers {
            if !series.labels.contains(&matcher.name) {
                return Err(format!("{name} has no label {}", matcher.name));
            }
            // A value that is a variable of a dashboard's is anything.
            let fixed =
                matches!(matcher.op, MatchOp::Equal | MatchOp::NotEqual) && !matcher.value.contains('$');
            let scraped = SCRAPED.contains(&matcher.name.as_str());
            if fixed && !scraped && !series.told.contains(&format!("`{}`", matcher.value)) {
                return Err(format!(
                    "docs/metrics.md tells of no {}={:?} of {name}",
                    matcher.name, matcher.value
                ));
            }
        }
        Ok(series.labels.clone())
    }
}

/// What is left of labels by `by` or `without`.
fn kept(labels: Labels, modifier: &LabelModifier) -> Result<Labels, String> {
    let named: Labels = modifier.labels().labels.iter().cloned().collect();
    if let Some(missing) = named.difference(&labels).next() {
        return Err(format!("nothing in it has the label {missing}"));
    }
    Ok(match modifier {
        LabelModifier::Include(_) => named,
        LabelModifier::Exclude(_) => labels.difference(&named).cloned().collect(),
    })
}

#[test]
fn queries_may_name_what_the_reference_names_alone() {
    let reference = Reference::read();
    let labels =
        |query| reference.check(query).map(|labels| labels.into_iter().collect::<Vec<_>>().join(" "));
    assert_eq!(
        labels("max by (class) (weighbridge_queue_messages{state=\"ready\"}) > 3"),
        Ok("class".to_owned())
    );
    assert_eq!(labels("sum(rate(weighbridge_step_seconds_bucket{step=~\"$step\"}[5m]))"), Ok(String::new()));
    assert_eq!(labels("weighbridge_ready == 0"), Ok("instance job".to_owned()));
    for wrong in [
        "weighbridge_queue_message",
        "weighbridge_step_seconds",
        "weighbridge_queue_messages{sate=\"ready\"}",
        "weighbridge_queue_messages{state=\"redy\"}",
        "sum by (model) (weighbridge_ready)",
        "histogram_quantile(0.5, sum by (le) (rate(weighbridge_step_seconds_count[5m])))",
        "weighbridge_ready ==",
    ] {
        assert!(reference.check(wrong).is_err(), "{wrong}");
    }
}
