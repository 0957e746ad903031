"""Small DICOM whole-slide images, made by pydicom."""

from pathlib import Path

import numpy as np
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

WHOLE_SLIDE = "1.2.840.10008.5.1.4.1.1.77.1.6"
TILE = 64


def write_series(
    folder: Path, picture: np.ndarray, *, container="", description="", mpp=0.5, levels=1, series=None
) -> tuple[str, list[Path]]:
    """Write one file per level, and a label, uncompressed. Return the UID of the series, and the files."""
    folder.mkdir(parents=True, exist_ok=True)
    series = series or generate_uid()
    study, reference = generate_uid(), generate_uid()
    files = []
    for number in range(levels):
        some = picture[:: 2**number, :: 2**number]
        files.append(_write(folder, some, "VOLUME", series, study, reference, container, description, mpp * 2**number))
    files.append(_write(folder, picture[:40, :40], "LABEL", series, study, reference, container, description, 10.0))
    return series, files


def _write(folder, picture, kind, series, study, reference, container, description, mpp) -> Path:
    height, width = picture.shape[:2]
    across, down = -(-width // TILE), -(-height // TILE)
    padded = np.full((down * TILE, across * TILE, 3), 255, np.uint8)
    padded[:height, :width] = picture
    frames = padded.reshape(down, TILE, across, TILE, 3).transpose(0, 2, 1, 3, 4)
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = WHOLE_SLIDE, generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    path = folder / f"{meta.MediaStorageSOPInstanceUID}.dcm"
    file = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    file.SOPClassUID, file.SOPInstanceUID = WHOLE_SLIDE, meta.MediaStorageSOPInstanceUID
    file.StudyInstanceUID, file.SeriesInstanceUID, file.FrameOfReferenceUID = study, series, reference
    file.PatientName, file.PatientID, file.PatientBirthDate, file.PatientSex = "Made^Up", "P1", "", ""
    file.StudyDate = file.StudyTime = file.AccessionNumber = file.StudyID = file.ReferringPhysicianName = ""
    file.Modality, file.Manufacturer, file.ManufacturerModelName = "SM", "carmil", "test"
    file.DeviceSerialNumber, file.SoftwareVersions = "1", "1"
    file.SeriesNumber, file.InstanceNumber, file.SeriesDescription = 1, 1, description
    file.ContainerIdentifier = container
    file.ImageType = ["ORIGINAL", "PRIMARY", kind, "NONE"]
    file.DimensionOrganizationType = "TILED_FULL"
    file.TotalPixelMatrixColumns, file.TotalPixelMatrixRows = width, height
    file.TotalPixelMatrixFocalPlanes, file.NumberOfFrames, file.NumberOfOpticalPaths = 1, across * down, 1
    file.Rows = file.Columns = TILE
    file.ImagedVolumeWidth, file.ImagedVolumeHeight, file.ImagedVolumeDepth = (
        width * mpp / 1e3,
        height * mpp / 1e3,
        0.001,
    )
    file.ImageOrientationSlide = [0, -1, 0, -1, 0, 0]
    origin = Dataset()
    origin.XOffsetInSlideCoordinateSystem, origin.YOffsetInSlideCoordinateSystem = 20, 40
    file.TotalPixelMatrixOriginSequence = [origin]
    measures, groups = Dataset(), Dataset()
    measures.PixelSpacing, measures.SliceThickness = [mpp / 1e3, mpp / 1e3], 0.001
    groups.PixelMeasuresSequence = [measures]
    file.SharedFunctionalGroupsSequence = [groups]
    file.SamplesPerPixel, file.PhotometricInterpretation, file.PlanarConfiguration = 3, "RGB", 0
    file.BitsAllocated = file.BitsStored = 8
    file.HighBit, file.PixelRepresentation = 7, 0
    file.PixelData = frames.tobytes()
    file.save_as(path, enforce_file_format=True)
    return path
