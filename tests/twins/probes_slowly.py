"""Slow twins of the probes: scikit-learn, one layer, one set of labels and one fold at a time."""

import numpy as np
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score, roc_auc_score
from sklearn.preprocessing import StandardScaler


def _said(train: np.ndarray, targets: np.ndarray, test: np.ndarray, penalty: float) -> np.ndarray:
    scaler = StandardScaler().fit(train)
    ridge = Ridge(alpha=penalty * train.shape[1], solver="svd").fit(scaler.transform(train), targets)
    return ridge.predict(scaler.transform(test)).reshape(len(test), -1)


def held_out_slowly(states: np.ndarray, targets: np.ndarray, folds: np.ndarray, penalties: list[float]) -> np.ndarray:
    """Scores [n, q] of one layer's states [n, m] for one set of labels."""
    scores = np.zeros_like(targets, dtype=float)
    for fold in range(folds.max() + 1):
        inner = (fold + 1) % (folds.max() + 1)
        rest = (folds != fold) & (folds != inner)
        errors = []
        for penalty in sorted(penalties, reverse=True):
            said = _said(states[rest], targets[rest], states[folds == inner], penalty)
            errors.append((((said - targets[folds == inner]) ** 2).sum(), penalty))
        best = min(errors, key=lambda pair: pair[0])[1]
        scores[folds == fold] = _said(states[folds != fold], targets[folds != fold], states[folds == fold], best)
    return scores


def accuracy_slowly(states: np.ndarray, labels: np.ndarray, folds: np.ndarray, penalties: list[float]) -> float:
    classes = sorted(set(labels))
    hot = np.array([[float(label == c) for c in classes] for label in labels])
    said = held_out_slowly(states.astype(float), hot, folds, penalties).argmax(1)
    return float(np.mean([classes[i] == label for i, label in zip(said, labels, strict=True)]))


def auroc_slowly(scores: np.ndarray, labels: np.ndarray) -> float:
    return float(roc_auc_score(labels, scores))


def r2_slowly(states: np.ndarray, targets: np.ndarray, folds: np.ndarray, penalties: list[float]) -> float:
    """R2 of one layer's states [n, m] for targets [n, q] on held-out folds, columns weighted by their variance."""
    scores = held_out_slowly(states.astype(float), targets, folds, penalties)
    return float(r2_score(targets, scores, multioutput="variance_weighted"))
