//! What a backend of the tests leaves to the one that it wraps, in its field `inner`.

/// Methods of [`Backend`](kv_backend::Backend) that are those of `self.inner`, whose rows it
/// has.
macro_rules! rows_of_inner {
    () => {
        fn info(&self) -> BackendInfo {
            self.inner.info()
        }

        fn allocate(&self, layout: &RowLayout) -> Result<Self::Rows, BackendError> {
            self.inner.allocate(layout)
        }

        fn read_rows(
            &self,
            rows: &Self::Rows,
            span: RowSpan,
            out: &mut [u8],
        ) -> Result<(), BackendError> {
            self.inner.read_rows(rows, span, out)
        }
    };
}

pub(crate) use rows_of_inner;
