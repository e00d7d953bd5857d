//! Attention where scores depend on the distance of query and key.

use bytemuck::{Pod, Zeroable};
use kv_graph::{RelativeBias, RelativeScores};

use super::attend::{Attention, PIECES, Settings};
use super::{Lower, Result, word};
use crate::device::Device;
use crate::program::{Grid, Operand};

/// `DistanceArgs` of `attend_distances.k`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct DistanceSettings {
    attend: Settings,
    tables: u32,
    reach: u32,
    n_buckets: u32,
}

impl<D: Device> Lower<'_, D> {
    /// Launches the pieces of few rows and those of many.
    pub(super) fn launch_distances(
        &mut self,
        attention: &Attention<'_, D>,
        visibility: usize,
        relative: &RelativeBias,
    ) -> Result<()> {
        let Attention { node, settings, .. } = attention;
        let table = relative.buckets.table();
        // Numbers of buckets are small enough for floats.
        let buckets: Vec<f32> = table.buckets().iter().map(|&b| b as f32).collect();
        let name = format!("buckets {}", relative.buckets);
        let device = &self.context.shared.device;
        let buckets = self.context.weights.constant(device, name, &buckets)?;
        let [of_queries, of_keys] = match &relative.scores {
            RelativeScores::Weight(name) => {
                let weight = self.floats(name, node)?;
                [weight.clone(), weight]
            }
            RelativeScores::Tables => [self.operand(node, 4)?, self.operand(node, 5)?],
        };
        let settings = DistanceSettings {
            attend: *settings,
            tables: u32::from(relative.scores == RelativeScores::Tables),
            reach: table.reach(),
            n_buckets: word(relative.buckets.n())?,
        };
        let (kernel, at_once) = if attention.attended.is_wide() {
            ("attend_distances", 4)
        } else {
            ("attend_distances_odd", 1)
        };
        let mut operands = attention.operands();
        operands.extend([Operand::Weight(buckets), of_queries, of_keys]);
        operands.push(attention.partial.clone());
        for (many, n_rows) in PIECES {
            let grid = Grid::pieces(many, attention.n_blocks(n_rows, at_once), visibility);
            let attend = Settings {
                many,
                ..settings.attend
            };
            let settings = DistanceSettings { attend, ..settings };
            self.launch(kernel, grid, operands.clone(), &settings)?;
        }
        Ok(())
    }
}
