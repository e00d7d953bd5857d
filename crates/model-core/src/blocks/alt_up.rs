//! AltUp: rows of several streams, of which a layer computes one and predicts and corrects the
//! others (Baykal et al., arXiv 2301.13310; Gemma 3n).
//!
//! Streams are `[rows, streams, dim]`. Does not know what a layer computes.

use kv_graph::{GraphBuilder, GraphError, NodeId, NormGain};

use super::Norm;

/// Settings of AltUp.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AltUp {
    /// Number of streams, at least 2.
    pub n_streams: usize,
    /// The one that layers compute.
    pub active: usize,
    /// Width of a stream.
    pub dim: usize,
    /// Norm of what the router reads.
    pub norm: Norm,
}

/// Added to mean squares that rows are divided by to give them another length: only for rows of
/// zeros.
const NO_EPS: f32 = 1e-12;

impl AltUp {
    /// The streams of the rows `x [rows, dim]`: the rows themselves, then projections of them
    /// (`altup_proj.weight`, `[streams - 1, dim, dim]`) of their length.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn spread(&self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        let others = self.n_streams.saturating_sub(1);
        let copies = self.repeated(b, "altup_copies", x, others)?;
        let copies = self.as_streams(b, "altup_inp", copies, others)?;
        let weight = "altup_proj.weight";
        let projected = b.head_linear("altup_proj", copies, weight, self.dim)?;
        let projected = self.as_long_as(b, "altup_proj", x, projected)?;
        let all = b.concat("altup_flat", x, projected)?;
        self.as_streams(b, "altup_streams", all, self.n_streams)
    }

    /// The rows of streams: the mean of the first one and of projections of the others
    /// (`altup_unembd_proj.weight`) of its length.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn merge(&self, b: &mut GraphBuilder, streams: NodeId) -> Result<NodeId, GraphError> {
        let (n, dim) = (self.n_streams, self.dim);
        let flat = self.flat(b, "altup_last", streams)?;
        let first = b.columns("altup_first", flat, 0..dim)?;
        let others = b.columns("altup_others", flat, dim..n * dim)?;
        let others = self.as_streams(b, "altup_others_streams", others, n.saturating_sub(1))?;
        let weight = "altup_unembd_proj.weight";
        let projected = b.head_linear("altup_unembd", others, weight, dim)?;
        let projected = self.as_long_as(b, "altup_unembd", first, projected)?;
        let mut sum = first;
        for at in 1..n {
            let (first, name) = ((at - 1) * dim, format!("altup_unembd_{at}"));
            let one = b.columns(&name, projected, first..first + dim)?;
            sum = b.add(&format!("altup_sum_{at}"), sum, one)?;
        }
        b.scale("altup_mean", sum, 1.0 / n as f32)
    }

    /// The layer's prediction of its streams: linear combinations of them, which a router chooses,
    /// added.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn predict(&self, b: &mut GraphBuilder, streams: NodeId) -> Result<NodeId, GraphError> {
        let n = self.n_streams;
        let active = self.active(b, "altup_inp_active", streams)?;
        let modalities = self.modalities(b, "altup_predict", active)?;
        let weight = "altup_predict_coef.weight";
        let coefficients = b.linear("altup_predict_coef", modalities, weight, n * n)?;
        let rows = b.shape_of(coefficients).first().copied().unwrap_or(0);
        let name = "altup_predict_coefs";
        let coefficients = b.reshape(name, coefficients, &[rows, n, n])?;
        let mixed = b.mix("altup_mixed", streams, coefficients)?;
        b.add("altup_predicted", mixed, streams)
    }

    /// The active stream, `[rows, dim]`.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn active(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        streams: NodeId,
    ) -> Result<NodeId, GraphError> {
        let flat = self.flat(b, &format!("{name}_flat"), streams)?;
        let first = self.active * self.dim;
        b.columns(name, flat, first..first + self.dim)
    }

    /// The predicted streams, corrected by how far `computed [rows, dim]` is from the active one.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn correct(
        &self,
        b: &mut GraphBuilder,
        predicted: NodeId,
        computed: NodeId,
    ) -> Result<NodeId, GraphError> {
        let n = self.n_streams;
        let modalities = self.modalities(b, "altup_correct", computed)?;
        let expected = self.active(b, "altup_expected", predicted)?;
        let expected = b.scale("altup_expected_negated", expected, -1.0)?;
        let innovation = b.add("altup_innovation", computed, expected)?;
        let weight = "altup_correct_coef.weight";
        let coefficients = b.linear("altup_correct_coef", modalities, weight, n)?;
        let rows = b.shape_of(coefficients).first().copied().unwrap_or(0);
        let name = "altup_correct_coefs";
        let coefficients = b.reshape(name, coefficients, &[rows, n, 1])?;
        let one = self.as_streams(b, "altup_innovation_stream", innovation, 1)?;
        let weighed = b.mix("altup_weighed", one, coefficients)?;
        let whole = self.repeated(b, "altup_innovations", innovation, n)?;
        let whole = self.as_streams(b, "altup_innovation_streams", whole, n)?;
        let change = b.add("altup_change", weighed, whole)?;
        b.add("altup_corrected", change, predicted)
    }

    /// The streams with `added [rows, dim]` added to all but the first.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn add_to_others(
        &self,
        b: &mut GraphBuilder,
        streams: NodeId,
        added: NodeId,
    ) -> Result<NodeId, GraphError> {
        let (n, dim) = (self.n_streams, self.dim);
        let flat = self.flat(b, "altup_out_flat", streams)?;
        let first = b.columns("altup_out_first", flat, 0..dim)?;
        let others = b.columns("altup_out_others", flat, dim..n * dim)?;
        let added = self.repeated(b, "altup_added", added, n.saturating_sub(1))?;
        let others = b.add("altup_out_added", others, added)?;
        let all = b.concat("altup_out", first, others)?;
        self.as_streams(b, "l_out", all, n)
    }

    /// The router's values of rows `[rows, dim]`: one for each stream, between -1 and 1.
    fn modalities(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let node = |what: &str| format!("{name}_{what}");
        let normed = self.norm.build(b, &node("norm"), x, "altup_router_norm")?;
        let scaled = b.scale(&node("inp"), normed, 1.0 / self.dim as f32)?;
        let weight = "altup_router.weight";
        let routed = b.linear(&node("router"), scaled, weight, self.n_streams)?;
        // The hyperbolic tangent.
        b.soft_cap(&node("modalities"), routed, 1.0)
    }

    /// Rows `x [rows, n, dim]`, flat, each as long as the row of `like [rows, dim]`.
    fn as_long_as(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        like: NodeId,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let node = |what: &str| format!("{name}_{what}");
        let (rows, dim) = (b.shape_of(like).first().copied().unwrap_or(0), self.dim);
        // The product of a row with itself at length 1 is its length.
        let unit = b.rms_norm_with(&node("unit"), like, NormGain::None, NO_EPS)?;
        let unit = b.reshape(&node("unit_column"), unit, &[rows, dim, 1])?;
        let row = b.reshape(&node("row"), like, &[rows, 1, dim])?;
        let length = b.mix(&node("sum"), unit, row)?;
        let length = b.scale(&node("length"), length, 1.0 / dim as f32)?;
        let normed = b.rms_norm_with(&node("normed"), x, NormGain::None, NO_EPS)?;
        let width = b.shape_of(normed).iter().skip(1).product();
        let normed = b.reshape(&node("normed_row"), normed, &[rows, 1, width])?;
        let scaled = b.mix(&node("scaled"), normed, length)?;
        b.reshape(&node("flat"), scaled, &[rows, width])
    }

    /// `n` copies of `x [rows, dim]` next to each other, `[rows, n * dim]`.
    fn repeated(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
        n: usize,
    ) -> Result<NodeId, GraphError> {
        let mut all = x;
        for at in 1..n {
            all = b.concat(&format!("{name}_{at}"), all, x)?;
        }
        Ok(all)
    }

    /// `[rows, n * dim]` as `[rows, n, dim]`.
    fn as_streams(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        flat: NodeId,
        n: usize,
    ) -> Result<NodeId, GraphError> {
        let rows = b.shape_of(flat).first().copied().unwrap_or(0);
        b.reshape(name, flat, &[rows, n, self.dim])
    }

    /// All streams next to each other, `[rows, streams * dim]`.
    fn flat(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        streams: NodeId,
    ) -> Result<NodeId, GraphError> {
        let rows = b.shape_of(streams).first().copied().unwrap_or(0);
        b.reshape(name, streams, &[rows, self.n_streams * self.dim])
    }
}
