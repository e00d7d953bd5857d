//! [`Reference`]: what an independent implementation computed.

use std::collections::HashMap;

/// Numbers of an independent implementation for three prompts.
#[derive(Clone, Debug)]
pub struct Reference {
    tensors: HashMap<String, (Vec<usize>, Vec<[u8; 4]>)>,
}

impl Reference {
    pub(crate) fn open(path: &str) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.iter().map(|(name, tensor)| {
            let words = tensor.data().as_chunks::<4>().0.to_vec();
            (name.to_owned(), (tensor.shape().to_vec(), words))
        });
        Self {
            tensors: tensors.collect(),
        }
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        let words = self.tensors[name].1.iter();
        words.map(|b| u32::from_le_bytes(*b)).collect()
    }

    /// All three prompts.
    pub fn prompts(&self) -> Vec<Vec<u32>> {
        (0..3).map(|i| self.ids(&format!("ids_{i}"))).collect()
    }

    /// What follows a prompt.
    pub fn greedy(&self, prompt: usize) -> Vec<u32> {
        self.ids(&format!("greedy_{prompt}"))
    }

    /// Logits of the last tokens of a prompt: of all of the first.
    pub fn logits(&self, prompt: usize) -> Vec<f32> {
        self.values(&format!("logits_{prompt}")).unwrap().1
    }

    /// Shape and values of a tensor, where there is one.
    pub fn values(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        let (shape, words) = self.tensors.get(name)?;
        let values = words.iter().map(|b| f32::from_le_bytes(*b)).collect();
        Some((shape.clone(), values))
    }
}
